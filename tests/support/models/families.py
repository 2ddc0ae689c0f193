"""Small configurations of families of transformers."""

from __future__ import annotations

from typing import Any

BASE = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,  # whose embedding would have no gradient there
    "bos_token_id": None,
    "eos_token_id": None,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
QWEN3 = {**BASE, "head_dim": 12}
LFM2 = {
    **BASE,
    "intermediate_size": 72,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
OLMO3 = {**BASE, "num_hidden_layers": 4, "sliding_window": 7}
OLMO_HYBRID = {
    **BASE,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 6,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}
QWEN3_5 = {
    **BASE,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
}
EXPERTS = {
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20,
    "num_experts_per_tok": 2,
    "num_experts": 4,
}
QWEN3_NEXT = {**QWEN3_5, **EXPERTS}
WITHOUT_MLP = {key: value for key, value in QWEN3_5.items() if key != "intermediate_size"}
NEMOTRON = {
    **BASE,
    "layers_block_type": ["mamba", "moe", "attention", "moe", "mamba"],
    "head_dim": 12,
    "ssm_state_size": 6,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "chunk_size": 8,
    "time_step_min": 1e-30,  # a bound of dt, which the published models were trained without
    "n_routed_experts": 8,
    "moe_intermediate_size": 12,
    "moe_shared_expert_intermediate_size": 20,
    "num_experts_per_tok": 2,
    "routed_scaling_factor": 2.5,
    "n_group": 4,
    "topk_group": 2,
}
GRANITE = {
    **BASE,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 6,
    "mamba_chunk_size": 8,
    "num_local_experts": 4,
    "shared_intermediate_size": 20,
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.3,
    "logits_scaling": 8.0,
}
KIMI = {
    **BASE,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_experts": 8,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 12,
    "num_shared_experts": 2,
    "num_expert_group": 4,
    "topk_group": 2,
}
FALCON = {
    **BASE,
    "mamba_d_ssm": 48,
    "mamba_n_heads": 8,
    "mamba_d_head": 6,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_chunk_size": 8,
    "embedding_multiplier": 5.5,
    "lm_head_multiplier": 0.4,
    "key_multiplier": 0.7,
    "attention_in_multiplier": 1.25,
    "attention_out_multiplier": 0.9,
    "ssm_in_multiplier": 1.5,
    "ssm_out_multiplier": 0.6,
    "mlp_multipliers": [0.8, 0.3],
    "ssm_multipliers": [0.5, 0.7, 1.5, 2.0, 0.3],
}
GPT_OSS = {
    **BASE,
    "num_hidden_layers": 4,
    "head_dim": 12,
    "sliding_window": 7,
    "intermediate_size": 20,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "swiglu_limit": 0.5,
    "rope_parameters": {**YARN, "rope_theta": 150.0, "truncate": False},
}
DEEPSEEK = {
    **BASE,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 10,
    "kv_lora_rank": 14,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "rope_parameters": {**YARN, "rope_theta": 150.0, "mscale": 0.7, "mscale_all_dim": 1.3},
    "num_mtp_layers": 0,
}
LFM3 = {
    **BASE,
    "num_hidden_layers": 5,
    "head_dim": 12,
    "sliding_window": 7,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 30.0,
            "partial_rotary_factor": 0.5,
        },
    },
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", BASE),
    "qwen2-windows": ("qwen2", {**BASE, **WINDOWS, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**QWEN3, "rope_theta": 1e6}),
    "qwen3-windows": ("qwen3", {**QWEN3, **WINDOWS, "attention_bias": True, "rms_norm_eps": 1e-3}),
    "olmo2": ("olmo2", BASE),
    "olmo2-tied": ("olmo2", {**BASE, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("olmo3", {**OLMO3, "rope_scaling": YARN}),
    "olmo3-few": ("olmo3", {**OLMO3, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "olmo_hybrid": ("olmo_hybrid", OLMO_HYBRID),
    "olmo_hybrid-small": (
        "olmo_hybrid",
        {
            **OLMO_HYBRID,
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
            "linear_num_value_heads": 4,
            "linear_allow_neg_eigval": False,
            "linear_value_head_dim": 4,
        },
    ),
    "qwen3_next": ("qwen3_next", {**QWEN3_NEXT, "mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen3_next-dense": ("qwen3_next", {**QWEN3_NEXT, "num_experts": 0, "attention_bias": True}),
    "qwen3_5": ("qwen3_5_text", {**QWEN3_5, "partial_rotary_factor": 0.5}),
    "qwen3_5_moe": ("qwen3_5_moe_text", {**WITHOUT_MLP, **EXPERTS, "tie_word_embeddings": True}),
    "nemotron_h": ("nemotron_h", NEMOTRON),
    "nemotron_h-dense": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mlp_bias": True},
    ),
    "granite": ("granitemoehybrid", GRANITE),
    "granite-dense": (
        "granitemoehybrid",
        {**GRANITE, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "kimi": ("kimi_linear", KIMI),
    "kimi-latent-queries": (
        "kimi_linear",
        {**KIMI, "q_lora_rank": 10, "mlp_layer_types": ["sparse", "dense", "sparse"]},
    ),
    "falcon_h1": ("falcon_h1", FALCON),
    "falcon_h1-norm": (
        "falcon_h1",
        {
            **FALCON,
            "mamba_d_ssm": None,
            "mamba_d_head": "auto",
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mlp_bias": True,
            "attention_bias": True,
        },
    ),
    "gpt_oss": ("gpt_oss", GPT_OSS),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK),
    "deepseek_v3-queries": (
        "deepseek_v3",
        {**DEEPSEEK, "q_lora_rank": None, "rope_parameters": None, "first_k_dense_replace": 0},
    ),
    "lfm3": ("lfm3", LFM3),
    "lfm3-plain": (
        "lfm3",
        {
            **LFM3,
            "use_sandwich_norm": False,
            "use_attention_gate": False,
            "attention_bias": True,
            "conv_L_cache": 3,
            "tie_word_embeddings": False,
        },
    ),
    "lfm2": ("lfm2", {**LFM2, "block_auto_adjust_ff_dim": False}),
    "lfm2-untied": (
        "lfm2",
        {**LFM2, "block_multiple_of": 20, "conv_L_cache": 7, "tie_word_embeddings": False},
    ),
}
