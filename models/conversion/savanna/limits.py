"""Savanna's keys that headrace cannot express, with the values that need nothing.

A key in MISSING changes how a model trains or runs: the conversion goes on, and names it. A key in
REFUSED changes the model's function: the conversion stops. Each entry is (Savanna's default,
harmless values, reason).
"""

from __future__ import annotations

from typing import Any

Limit = tuple[Any, tuple[Any, ...], str]
OFF = (False, None, 0)

MISSING: dict[str, Limit] = {
    "hidden_dropout": (0.1, (0.0,), "headrace has no dropout"),
    "pretraining_strategy": ("AR", ("AR",), "headrace trains the next token only"),
    "hyena_filter_wd": (0.0, (0, 0.0), "the taps of MR have no weight decay"),
    "eod_mask_loss": (
        False,
        (True,),
        "headrace always masks the loss of the token after a document's end",
    ),
    "pad_mask_loss": (False, OFF, "rows have no padding: documents are packed"),
    "use_fp8_linears": (False, OFF, "not converted: choose with precision=fp8 and fp8.matrices"),
    "use_fp8_mlp_projections": (
        False,
        OFF,
        "not converted: choose with precision=fp8 and fp8.matrices",
    ),
    "use_fp8_input_projections": (
        False,
        OFF,
        "not converted: choose with precision=fp8 and fp8.matrices",
    ),
    "use_fp8_output_projections": (
        False,
        OFF,
        "not converted: choose with precision=fp8 and fp8.matrices",
    ),
    "use_fp8_hyena_mlp_input_projections": (
        False,
        OFF,
        "not converted: choose with precision=fp8 and fp8.matrices",
    ),
    "use_fp8_hyena_mlp_output_projections": (
        False,
        OFF,
        "not converted: choose with precision=fp8 and fp8.matrices",
    ),
    "checkpoint_scale": ("linear", ("linear",), "checkpoints are saved at equal intervals"),
    "extra_save_iters": (None, (None, []), "checkpoints are saved at equal intervals"),
    "checkpoint_validation_with_forward_pass": (False, OFF, "checkpoints are verified by hashes"),
    "no_save_optim": (False, OFF, "a checkpoint holds the optimizer; `trainer export` drops it"),
    "no_save_rng": (False, OFF, "random numbers are a function of seed and step"),
    "weight_by_num_documents": (False, OFF, "weights of sources are given, not drawn"),
    "weighted_sampler_alpha": (0.3, (0.3, None), "weights of sources are given, not drawn"),
    "use_mup": (False, OFF, "headrace has no μP; `optimizer.groups` sets rates by name"),
    "coord_check": (False, OFF, "headrace has no μP"),
    "save_base_shapes": (False, OFF, "headrace has no μP"),
    "base_shapes_file": (None, OFF, "headrace has no μP"),
    "mup_init_scale": (1.0, (1.0,), "headrace has no μP"),
    "mup_attn_temp": (1.0, (1.0,), "headrace has no μP"),
    "mup_output_temp": (1.0, (1.0,), "headrace has no μP"),
    "mup_embedding_mult": (1.0, (1.0,), "headrace has no μP"),
    "mup_rp_embedding_mult": (1.0, (1.0,), "headrace has no μP"),
    "mup_width_scale": (2, (2,), "headrace has no μP"),
    "use_bnb_optimizer": (False, OFF, "headrace has AdamW and Muon"),
    "scheduler": (None, OFF, "rates come from the mixture's phases"),
    "sparse_gradients": (False, OFF, "gradients are dense"),
    "amp": (None, OFF, "headrace has bf16 with fp32 masters"),
    "curriculum_learning": (None, OFF, "a phase of a mixture has one row length"),
    "curriculum_seqlen": (0, OFF, "a phase of a mixture has one row length"),
    "data_efficiency": (None, OFF, "rows are a function of the plan"),
    "elasticity": (None, OFF, "the batch is a key of the mixture"),
    "compression_training": (None, OFF, "headrace has none"),
    "checkpoint": (None, OFF, "headrace has a checkpoint format of its own"),
    "data_types": (None, OFF, "gradients are summed in fp32"),
    "deepspeed_extra_args": (
        None,
        (None, {}),
        "options of DeepSpeed that headrace does not pass on",
    ),
    "alignment_method": (None, OFF, "headrace pretrains"),
    "dpo_beta": (1.0, (1.0,), "headrace pretrains"),
    "dpo_data_seq_length": (None, OFF, "headrace pretrains"),
    "soft_prompt_tuning": (None, OFF, "headrace pretrains"),
    "use_cgcg": (
        False,
        OFF,
        "its two-pass kernel reverses MR's filter and drops the skip; headrace does neither",
    ),
    "use_cgcg_short": (False, OFF, "its two-pass kernel reverses the filter; headrace does not"),
    "use_cgcg_mlp": (False, OFF, "its two-pass kernel reverses the filter; headrace does not"),
}

REFUSED: dict[str, Limit] = {
    "prenorm": (True, (True,), "layers have a norm before each operator"),
    "pre_mlp_norm": (False, (True,), "layers have a norm before each operator"),
    "postnorm": (False, OFF, "layers have no norm after an operator"),
    "outer_mlp_norm": (False, OFF, "layers have no norm after an operator"),
    "safe": (False, OFF, "layers choose their MLP by name"),
    "gpt_j_residual": (False, OFF, "layers are sequential"),
    "gpt_j_tied": (False, OFF, "layers are sequential"),
    "identity_mlp": (False, OFF, "Savanna adds the normed stream to itself there"),
    "tie_projection_weights": (False, OFF, "q, k and v have weights of their own"),
    "proj_groups": (1, (1,), "Savanna mixes repeated keys and values with queries of other heads"),
    "normalize_hyena_filters": (False, OFF, "filters are not normalised"),
    "bidirectional": (False, OFF, "filters are causal"),
    "use_fast_heads": (False, OFF, "no heads that sum before the filter (Savanna dropped them)"),
    "hyena_width_expansion": (1.0, (1.0,), "Hyena mixers have the model's width"),
    "hyena_pos_emb": ("fourier_fixed", ("fourier_fixed",), "features of time are fixed"),
    "use_depthwise_short_conv_grouping": (True, (True,), "short filters are depthwise"),
    "apply_query_key_layer_scaling": (False, OFF, "attention has one scale"),
    "rpe_num_buckets": (32, (32,), "headrace has no relative positions of T5"),
    "rpe_max_distance": (128, (128,), "headrace has no relative positions of T5"),
    "opt_pos_emb_offset": (0, (0,), "learned positions start at 0"),
    "sparsity_config": (None, (None, {}), "headrace has no block-sparse attention"),
    "sparse_attention": (None, (None, {}), "headrace has no block-sparse attention"),
    "num_unique_layers": (None, OFF, "layers share no weights"),
    "param_sharing_style": ("grouped", ("grouped",), "layers share no weights"),
    "gmlp_attn_dim": (64, (64,), "headrace has no gMLP"),
}
