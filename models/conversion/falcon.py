"""Falcon-H1: attention and Mamba-2 side by side on one norm, then a SwiGLU; multipliers of
embedding, inputs, outputs, keys, gates and logits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..config.options.attention import AttentionOptions
from ..config.options.mlp import GLUOptions
from .decoder import MODEL_FIELDS, Decoder, Part
from .family import Settings, refuse
from .keys import Computed, EqualLayers, Key, Rotary, flag
from .llama import ATTENTION, BIAS, GLU_NAMES, HEAD_DIM, MIXER_NORM, kv_heads
from .mamba import mamba2_part


def read_gated_norm(settings: Mapping[str, Any]) -> bool:
    if not settings.get("mamba_rms_norm", False):
        return False
    before = settings.get("mamba_norm_before_gate", True)
    if before:
        refuse("mamba_norm_before_gate", "is not supported with mamba_rms_norm")
    return True


def read_bias(settings: Mapping[str, Any]) -> bool:
    bias = bool(settings.get("mamba_proj_bias", False))
    output_bias = bool(settings.get("projectors_bias", False))
    if output_bias != bias:
        refuse("projectors_bias", f"{output_bias} is not mamba_proj_bias ({bias})")
    return bias


def read_heads(settings: Mapping[str, Any]) -> int:
    return int(settings["mamba_n_heads"])


def read_scale(settings: Mapping[str, Any]) -> float:
    """Return the factor of the scores: that of the keys is one of the scores."""
    dim = settings["hidden_size"] // settings["num_attention_heads"]
    dim = settings.get("head_dim") or dim
    return float(settings.get("key_multiplier", 1.0) * dim**-0.5)


def write_scale(value: float | None, options: AttentionOptions, width: int) -> Settings:
    dim = options.dim(width)
    return {"key_multiplier": 1.0 if value is None else round(value * dim**0.5, 15)}


def write_mlp(gate: float, options: GLUOptions, width: int) -> Settings:
    return {"mlp_multipliers": [gate, options.output_multiplier]}


def read_projections(settings: Mapping[str, Any]) -> tuple[float, ...] | None:
    multipliers = tuple(float(factor) for factor in settings.get("ssm_multipliers") or ())
    return None if set(multipliers) <= {1.0} else multipliers


FALCON_H1 = Decoder(
    model_type="falcon_h1",
    architecture="FalconH1ForCausalLM",
    models="0.5B, 1.5B, 3B, 7B, 34B",
    parts={
        "attention": Part(
            options=AttentionOptions,
            module="self_attn",
            names=ATTENTION,
            norms=MIXER_NORM,
            fields={
                "heads": "num_attention_heads",
                "kv_heads": kv_heads(8),
                "head_dim": HEAD_DIM,
                "rope": Rotary(),
                "qkv_bias": BIAS,
                "output_bias": BIAS,
                "softmax_scale": Computed(read_scale, write_scale),
                "input_multiplier": Key("attention_in_multiplier", 1.0),
                "output_multiplier": Key("attention_out_multiplier", 1.0),
            },
        ),
        "mamba": mamba2_part(
            {
                "heads": Computed(
                    read_heads,
                    lambda value, options, width: {
                        "mamba_n_heads": options.num_heads(width),
                        "mamba_d_ssm": options.inner(width),
                    },
                ),
                "gated_norm": Computed(
                    read_gated_norm,
                    lambda value, options, width: {
                        "mamba_rms_norm": value,
                        "mamba_norm_before_gate": False,
                    },
                ),
                "projection_multipliers": Computed(
                    read_projections,
                    lambda value, options, width: {"ssm_multipliers": list(value or [1.0] * 5)},
                ),
                "bias": Computed(
                    read_bias,
                    lambda value, options, width: {
                        "mamba_proj_bias": value,
                        "projectors_bias": value,
                    },
                ),
                "input_multiplier": Key("ssm_in_multiplier", 1.0),
                "output_multiplier": Key("ssm_out_multiplier", 1.0),
            }
        ),
        "glu": Part(
            options=GLUOptions,
            module="feed_forward",
            names=GLU_NAMES,
            norms={"norm": "pre_ff_layernorm"},
            fields={
                "hidden": "intermediate_size",
                "bias": flag("mlp_bias", False),
                "gate_multiplier": Computed(
                    lambda settings: (settings.get("mlp_multipliers") or [1.0, 1.0])[0], write_mlp
                ),
                "output_multiplier": Computed(
                    lambda settings: (settings.get("mlp_multipliers") or [1.0, 1.0])[1],
                    lambda value, options, width: {},
                ),
            },
        ),
    },
    layers=EqualLayers("attention|mamba/glu"),
    fields={
        **MODEL_FIELDS,
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "embedding_multiplier": Key("embedding_multiplier", 1.0),
        "logits_multiplier": Key("lm_head_multiplier", 1.0),
    },
    ends={"embedding": "model.embed_tokens", "norm": "model.final_layernorm", "head": "lm_head"},
    expected={"hidden_act": "silu", "mamba_conv_bias": True},
    refused={
        "time_step_limit": [0.0, math.inf],
        "mamba_use_mlp": True,
        "attn_layer_indices": None,
    },
)
