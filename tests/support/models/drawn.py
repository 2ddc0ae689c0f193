"""Random small configurations of families of transformers: sizes that divide nothing, layers in any
order, and every switch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import Any

Values = dict[str, Any]
VOCABULARY = 41
FACTORS = [0.5, 0.7, 1.0, 1.5, 2.0]


def draw_settings(kind: str, seed: int) -> Values:
    """Return settings of a family; transformers may refuse them, and so may we, by name."""
    return FAMILIES[kind](Random(f"{kind} {seed}"))


def draw_some(random: Random, **choices: Sequence[Any]) -> Values:
    """Return some of the keys, each with one of its values; the others have the class's default."""
    return {key: random.choice(values) for key, values in choices.items() if random.random() < 0.6}


def draw_divisor(random: Random, number: int) -> int:
    return random.choice([n for n in range(1, number + 1) if number % n == 0])


def draw_rope(random: Random, **also: Any) -> Values | None:
    kind = random.choice(["default", "default", "linear", "llama3", "yarn", "yarn", None])
    if kind is None:
        return None
    rope = {"rope_type": kind, "rope_theta": random.choice([30.0, 150.0, 1e4]), **also}
    if kind != "default":
        rope["factor"] = random.choice([2.0, 3.7, 32.0])
    if kind in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = random.choice([8, 16, 64])
    if kind == "llama3":
        rope |= {"low_freq_factor": random.choice([0.5, 1.0]), "high_freq_factor": 4.0}
    if kind == "yarn":
        rope |= random.choice([{}, {"beta_fast": 8.0, "beta_slow": 2.0}, {"truncate": False}])
        scales = {"mscale": 0.7, "mscale_all_dim": 1.2}
        rope |= random.choice(
            [{}, {"attention_factor": 1.4}, scales, {"mscale": 0.5}, {"mscale_all_dim": 1.0}]
        )
    return rope


def draw_layers(random: Random, values: Values, *kinds: str, key: str = "layer_types") -> None:
    """Let a list name the layers, or a default derive them."""
    if random.random() < 0.6:
        values[key] = random.choices(kinds, k=values["num_hidden_layers"])


def draw_base(random: Random, *, head_dim: bool = False) -> Values:
    """Return sizes and rotary positions. If not `head_dim`, the class derives it from the width,
    unless a key says it."""
    heads, dim = random.choice([1, 2, 3, 4, 5, 6]), random.choice([4, 8, 12])
    width = random.choice([20, 24, 28, 36]) if head_dim else heads * dim * (1 + (heads == 1))
    values: Values = {
        "vocab_size": VOCABULARY,
        "hidden_size": width,
        "intermediate_size": random.choice([1, 7, 24, 52]),
        "num_hidden_layers": random.choice([1, 2, 3, 4, 5]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw_divisor(random, heads),
        "max_position_embeddings": random.choice([64, 128]),
        "tie_word_embeddings": random.random() < 0.5,
        "rms_norm_eps": random.choice([1e-6, 1e-5, 1e-2]),
        "rope_parameters": draw_rope(random),
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if head_dim or random.random() < 0.3:
        values["head_dim"] = dim
    return values


def rename(values: Values, old: str, new: str) -> Values:
    return {(new if key == old else key): value for key, value in values.items()}


def llama(random: Random) -> Values:
    values = draw_base(random) | draw_some(random, mlp_bias=[False, False, True])
    return values | draw_some(random, attention_bias=[True, False])


def draw_experts(random: Random, count: str, chosen: str = "num_experts_per_tok") -> Values:
    experts = random.choice([1, 2, 3, 6])
    values = {count: experts, chosen: random.randint(1, experts)}
    return values | draw_some(random, router_aux_loss_coef=[0.0, 0.1])


def mixtral(random: Random) -> Values:
    values = draw_base(random) | draw_experts(random, "num_local_experts")
    values |= {"hidden_size": 4 * values["hidden_size"], "intermediate_size": 12}
    return values | draw_some(random, sliding_window=[1, 3, 7, 100])


def qwen2(random: Random) -> Values:
    return draw_base(random) | draw_windows(random)


def qwen3(random: Random) -> Values:
    values = draw_base(random, head_dim=True) | draw_windows(random)
    return values | draw_some(random, attention_bias=[True, False])


def draw_windows(random: Random) -> Values:
    if random.random() < 0.3:
        return {}
    values = {"use_sliding_window": True, "sliding_window": random.choice([1, 2, 5, 40])}
    return values | draw_some(random, max_window_layers=[0, 1, 2, 9])


def mamba(random: Random) -> Values:
    values = {"vocab_size": VOCABULARY, "hidden_size": random.choice([8, 20]), "expand": 2}
    values |= {"num_hidden_layers": 2, "state_size": random.choice([1, 3, 16])}
    return values | draw_some(
        random,
        conv_kernel=[2, 3, 4],
        expand=[1, 2, 3],
        time_step_rank=[1, 2, 5, "auto"],
        use_bias=[True, False, False],
        use_conv_bias=[True, True, False],
        tie_word_embeddings=[True, False],
        layer_norm_epsilon=[1e-5, 1e-2],
        residual_in_fp32=[True, False],
    )


def mamba2(random: Random) -> Values:
    heads, dim = random.choice([2, 4, 6]), random.choice([2, 4, 6])
    values = {"vocab_size": VOCABULARY, "hidden_size": heads * dim, "expand": 1}
    values |= {"num_heads": heads, "head_dim": dim, "n_groups": draw_divisor(random, heads)}
    values |= {"num_hidden_layers": 2, "state_size": random.choice([1, 5, 8]), "chunk_size": 8}
    return values | draw_some(
        random,
        conv_kernel=[2, 3, 4],
        use_bias=[True, False],
        rms_norm=[True, True, False],
        norm_before_gate=[True, True, False],
        tie_word_embeddings=[True, False],
        layer_norm_epsilon=[1e-5, 1e-2],
    )


def draw_mamba(random: Random, width: int) -> Values:
    """Return the keys of Mamba-2 beside attention."""
    inner = width * (expand := random.choice([1, 2, 3]))
    heads = inner // random.choice([dim for dim in (2, 3, 4, 8) if inner % dim == 0])
    values = {
        "mamba_expand": expand,
        "mamba_n_heads": heads,
        "mamba_d_head": random.choice(["auto", inner // heads]),
        "mamba_n_groups": draw_divisor(random, heads),
        "mamba_d_state": random.choice([1, 4, 5]),
        "mamba_chunk_size": random.choice([4, 16]),
    }
    conv_bias = [True, True, True, False]
    return values | draw_some(
        random, mamba_d_conv=[2, 3, 4], mamba_proj_bias=[True, False], mamba_conv_bias=conv_bias
    )


def bamba(random: Random) -> Values:
    values = draw_base(random)
    values |= draw_mamba(random, values["hidden_size"])
    count = values["num_hidden_layers"] = random.choice([2, 3, 4, 5])
    values["attn_layer_indices"] = sorted(random.sample(range(count), random.randint(1, count - 1)))
    values["rope_parameters"] = draw_rope(random, partial_rotary_factor=0.5)
    switches = [False, False, False, True]
    return values | draw_some(random, attention_bias=switches, mlp_bias=switches)


def gpt2(random: Random) -> Values:
    heads = random.choice([1, 2, 3, 4])
    values = {"vocab_size": VOCABULARY, "n_embd": heads * random.choice([4, 6, 9])}
    values |= {"n_head": heads, "n_layer": random.choice([1, 2, 3]), "n_positions": 64}
    return values | draw_some(
        random,
        n_inner=[None, 10, 31],
        layer_norm_epsilon=[1e-5, 1e-2],
        tie_word_embeddings=[True, False],
        scale_attn_by_inverse_layer_idx=[False, False, True],
        reorder_and_upcast_attn=[True, False],
        activation_function=["gelu_new", "gelu_new", "relu"],
    )


def lfm2(random: Random) -> Values:
    values = rename(draw_base(random), "rms_norm_eps", "norm_eps")
    draw_layers(random, values, "conv", "full_attention")
    return values | draw_some(
        random,
        block_multiple_of=[1, 16, 20],
        block_ffn_dim_multiplier=[1.0, 1.3, 2.0],
        block_auto_adjust_ff_dim=[True, False],
        conv_L_cache=[2, 3, 7],
        conv_bias=[False, False, True],
    )


def lfm3(random: Random) -> Values:
    values = rename(draw_base(random, head_dim=True), "rms_norm_eps", "norm_eps")
    draw_layers(random, values, "conv", "full_attention", "sliding_attention")
    ropes = [draw_rope(random) or draw_proportional(random) for _ in range(2)]
    values["rope_parameters"] = dict(
        zip(("full_attention", "sliding_attention"), ropes, strict=True)
    )
    return values | draw_some(
        random,
        sliding_window=[1, 3, 7, 99],
        use_sandwich_norm=[True, False],
        use_attention_gate=[True, False],
        attention_bias=[True, False],
        conv_L_cache=[2, 3, 7],
    )


def draw_proportional(random: Random) -> Values:
    fraction = random.choice([0.25, 0.3, 0.5, 1.0])
    return {"rope_type": "proportional", "rope_theta": 30.0, "partial_rotary_factor": fraction}


def olmo2(random: Random) -> Values:
    return draw_base(random) | draw_some(random, attention_bias=[True, False])


def olmo3(random: Random) -> Values:
    values = olmo2(random) | {"sliding_window": random.choice([1, 3, 7, 99])}
    draw_layers(random, values, "sliding_attention", "full_attention")
    return values


def draw_delta(random: Random) -> Values:
    heads = random.choice([1, 2, 3])
    return {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads * random.choice([1, 2, 3]),
        "linear_key_head_dim": random.choice([4, 6, 7]),
        "linear_value_head_dim": random.choice([4, 9]),
        **draw_some(random, linear_conv_kernel_dim=[2, 3, 4]),
    }


def olmo_hybrid(random: Random) -> Values:
    values = olmo2(random) | draw_delta(random)
    if random.random() < 0.5:
        values["rope_parameters"] = {"rope_type": "default", "rope_theta": None}
    draw_layers(random, values, "linear_attention", "full_attention")
    return values | draw_some(random, linear_allow_neg_eigval=[True, False])


def qwen3_5(random: Random) -> Values:
    values = draw_base(random, head_dim=True) | draw_delta(random)
    values |= {"head_dim": random.choice([8, 16])}
    values["rope_parameters"] = draw_rope(
        random, partial_rotary_factor=random.choice([0.25, 0.5, 1.0])
    )
    draw_layers(random, values, "linear_attention", "full_attention")
    return values | draw_some(random, attention_bias=[True, False])


def draw_shared(random: Random) -> Values:
    """Return the keys of Qwen's experts."""
    values = {"moe_intermediate_size": random.choice([4, 12])}
    values |= {"shared_expert_intermediate_size": random.choice([4, 20])}
    return values | draw_experts(random, "num_experts")


def qwen3_5_moe(random: Random) -> Values:
    values = qwen3_5(random) | draw_shared(random)
    return {key: value for key, value in values.items() if key != "intermediate_size"}


def qwen3_next(random: Random) -> Values:
    values = qwen3_5(random) | draw_shared(random)
    values |= draw_some(random, decoder_sparse_step=[1, 2, 3], mlp_only_layers=[[], [0], [1]])
    return values | draw_some(random, norm_topk_prob=[True, False])


def draw_groups(random: Random, count: str) -> Values:
    """Return the keys of experts that are chosen by groups."""
    groups, size = random.choice([1, 2, 3]), random.choice([2, 3])
    chosen = random.randint(1, groups)
    values = {count: groups * size, "n_group": groups, "topk_group": chosen}
    values |= {"moe_intermediate_size": random.choice([4, 12])}
    values |= {"num_experts_per_tok": random.randint(1, chosen * size)}
    scales = [0.3, 1.0, 2.5]
    return values | draw_some(random, norm_topk_prob=[True, False], routed_scaling_factor=scales)


def nemotron_h(random: Random) -> Values:
    values = rename(draw_base(random, head_dim=True), "rms_norm_eps", "layer_norm_epsilon")
    count, heads = values.pop("num_hidden_layers"), random.choice([1, 2, 3, 6])
    kinds = ["mamba", "moe", "attention", "mlp"]
    values |= draw_groups(random, "n_routed_experts") | {
        "tie_word_embeddings": False,
        "layers_block_type": random.choices(kinds, k=count),
        "mamba_num_heads": heads,
        "mamba_head_dim": random.choice([2, 5, 8]),
        "n_groups": draw_divisor(random, heads),
        "ssm_state_size": random.choice([1, 6]),
        "chunk_size": 8,
        "time_step_min": 1e-30,
        "moe_shared_expert_intermediate_size": random.choice([4, 20]),
    }
    return values | draw_some(
        random,
        conv_kernel=[2, 3, 4],
        use_bias=[True, False],
        mlp_bias=[True, False, False],
        attention_bias=[False, False, True],
        mlp_hidden_act=["relu2", "silu", "relu"],
        n_shared_experts=[1, 2],
    )


def granite(random: Random) -> Values:
    values = draw_base(random) | draw_experts(random, "num_local_experts")
    values |= draw_mamba(random, values["hidden_size"])
    values |= {"num_local_experts": random.choice([0, values["num_local_experts"]])}
    values |= {"shared_intermediate_size": random.choice([3, 20]), "intermediate_size": 12}
    count = values["num_hidden_layers"]
    values["layer_types"] = random.choices(["mamba", "attention"], k=count)
    return values | draw_some(
        random,
        position_embedding_type=["rope", "nope", None],
        attention_bias=[True, False],
        embedding_multiplier=[0.3, 1, 12.0],
        residual_multiplier=[0.22, 1.0],
        attention_multiplier=[0.0078125, 0.3, 1],
        logits_scaling=[0.7, 3, 8.0],
    )


def falcon_h1(random: Random) -> Values:
    values = draw_base(random)
    values |= draw_mamba(random, values["hidden_size"]) | {"mamba_d_ssm": None}
    if random.random() < 0.6:
        values |= {"mamba_d_ssm": 3 * values["mamba_n_heads"], "mamba_d_head": "auto"}
    names = ["lm_head", "embedding", "key", "attention_in", "attention_out", "ssm_in", "ssm_out"]
    values |= draw_some(random, **{f"{name}_multiplier": FACTORS for name in names})
    values |= draw_some(random, mlp_multipliers=[random.choices(FACTORS, k=2)])
    values |= draw_some(random, ssm_multipliers=[random.choices(FACTORS, k=5)])
    return values | draw_some(
        random,
        mamba_rms_norm=[True, False],
        mamba_norm_before_gate=[False, False, True],
        projectors_bias=[values.get("mamba_proj_bias", False), True],
        attention_bias=[True, False],
        mlp_bias=[True, False],
    )


def draw_latents(random: Random) -> Values:
    values = draw_base(random)
    values.pop("head_dim", None)
    return values | {
        "num_key_value_heads": values["num_attention_heads"],
        "kv_lora_rank": random.choice([1, 7, 14]),
        "q_lora_rank": random.choice([None, 5, 10]),
        "qk_nope_head_dim": random.choice([2, 5, 8]),
        "qk_rope_head_dim": random.choice([2, 4, 6]),
        "v_head_dim": random.choice([1, 6, 15]),
    }


def kimi_linear(random: Random) -> Values:
    values = draw_latents(random) | draw_groups(random, "num_local_experts")
    values |= {"tie_word_embeddings": False, "rope_parameters": None}
    values |= {"linear_head_dim": random.choice([4, 7]), "linear_num_heads": random.choice([1, 3])}
    draw_layers(random, values, "linear_attention", "full_attention")
    draw_layers(random, values, "sparse", "dense", key="mlp_layer_types")
    return values | draw_some(random, n_shared_experts=[1, 2], linear_conv_kernel_dim=[2, 3])


def gpt_oss(random: Random) -> Values:
    values = draw_base(random, head_dim=True) | draw_experts(random, "num_local_experts")
    values |= {"sliding_window": random.choice([1, 3, 7, 99]), "intermediate_size": 12}
    draw_layers(random, values, "sliding_attention", "full_attention")
    return values | draw_some(random, attention_bias=[True, False], swiglu_limit=[0.5, 7.0])


def deepseek_v3(random: Random) -> Values:
    values = draw_latents(random) | draw_groups(random, "n_routed_experts")
    values |= {"first_k_dense_replace": random.choice([0, 1, 9]), "num_mtp_layers": 0}
    return values | draw_some(random, n_shared_experts=[1, 2], rope_interleave=[True, True, False])


FAMILIES: dict[str, Callable[[Random], Values]] = {
    function.__name__: function
    for function in (
        *(llama, mixtral, qwen2, qwen3, mamba, mamba2, bamba, gpt2, lfm2, lfm3, olmo2, olmo3),
        *(olmo_hybrid, qwen3_next, nemotron_h, falcon_h1, kimi_linear, gpt_oss, deepseek_v3),
    )
}
FAMILIES |= {"qwen3_5_text": qwen3_5, "qwen3_5_moe_text": qwen3_5_moe, "granitemoehybrid": granite}
