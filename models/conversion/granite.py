"""Granite 4 H: Mamba-2 or attention, then experts and a shared SwiGLU, or that alone; multipliers
of embedding, residual branches, attention and logits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ..config.options.attention import AttentionOptions
from ..config.options.mlp import GLUOptions
from ..config.options.moe import MoEOptions
from ..config.options.rope import Rope
from .decoder import MODEL_FIELDS, Decoder, Part
from .family import Settings, refuse
from .keys import Computed, Field, Key, LayerTypes, Rotary, flag
from .llama import ATTENTION, BIAS, HEAD_DIM, MIXER_NORM, MLP_NORM, kv_heads
from .mamba import mamba2_part

RESIDUAL: Mapping[str, Field | str] = {"output_multiplier": Key("residual_multiplier", 1.0)}
MIXERS = {"linear_attention": "mamba", "full_attention": "attention"}
MIXERS |= {"mamba": "mamba", "attention": "attention"}
"""Words of transformers 5.24, then those of the published files, which are written."""


class GraniteRotary(Rotary):
    """Rotary positions if `position_embedding_type` says so."""

    def read(self, settings: Mapping[str, Any]) -> Rope | None:  # type: ignore[override]
        return super().read(settings) if settings.get("position_embedding_type") == "rope" else None

    def write(self, value: Rope | None, holder: Any, width: int) -> Settings:
        if value is None:
            return {"position_embedding_type": "nope"}
        return {**super().write(value, holder, width), "position_embedding_type": "rope"}


def read_logits_multiplier(settings: Mapping[str, Any]) -> float:
    scaling = float(settings.get("logits_scaling", 1.0))
    return 1 / scaling if scaling else refuse("logits_scaling", "must not be 0")


class GraniteLayers(LayerTypes):
    """Layer types; all layers have experts, or none."""

    def read(self, settings: Mapping[str, Any]) -> Sequence[str]:
        key = "layer_types" if settings.get("layer_types") else "layers_block_type"
        layers = LayerTypes(self.types, self.derive, key).read(settings)
        mlp = "moe" if settings.get("num_local_experts", 8) else "glu"
        return [f"{layer}/{mlp}" for layer in layers]

    def write(self, layers: Sequence[str]) -> Settings:
        settings = super().write([layer.partition("/")[0] for layer in layers])
        if not any(layer.startswith("mamba/") for layer in layers):
            settings["mamba_n_heads"] = 1  # the class checks its default, 128, against the width
        has_experts = any(layer.endswith("/moe") for layer in layers)
        return settings if has_experts else {**settings, "num_local_experts": 0}


GRANITE = Decoder(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    models="Granite 4.0 Nano 350M and 1B, Micro 3B, Tiny 7B-A1B, Small 32B-A9B",
    parts={
        "mamba": mamba2_part(
            {**RESIDUAL, "expand": "mamba_expand", "bias": flag("mamba_proj_bias", False)},
            optional=True,
        ),
        "attention": Part(
            options=AttentionOptions,
            module="self_attn",
            names=ATTENTION,
            norms=MIXER_NORM,
            fields={
                **RESIDUAL,
                "heads": "num_attention_heads",
                "kv_heads": kv_heads(None),
                "head_dim": HEAD_DIM,
                "rope": GraniteRotary(),
                "softmax_scale": Computed(
                    lambda settings: settings.get("attention_multiplier", 1.0),
                    lambda value, options, width: {
                        "attention_multiplier": value or options.dim(width) ** -0.5
                    },
                ),
                "qkv_bias": BIAS,
                "output_bias": BIAS,
            },
            optional=True,
        ),
        "moe": Part(
            options=MoEOptions,
            module="",
            names={
                "router": "block_sparse_moe.router.layer",
                "gate_up": "block_sparse_moe.input_linear.weight",
                "down": "block_sparse_moe.output_linear.weight",
                "shared.gate_up": "shared_mlp.input_linear",
                "shared.down": "shared_mlp.output_linear",
            },
            norms=MLP_NORM,
            fields={
                **RESIDUAL,
                "experts": "num_local_experts",
                "top_k": "num_experts_per_tok",
                "hidden": "intermediate_size",
                "shared_hidden": "shared_intermediate_size",
                "balance_loss": Key("router_aux_loss_coef", 0.0),
            },
            fixed={"normalize": True},
            optional=True,
        ),
        "glu": Part(
            options=GLUOptions,
            module="shared_mlp",
            names={"gate_up": "input_linear", "down": "output_linear"},
            norms=MLP_NORM,
            fields={**RESIDUAL, "hidden": "shared_intermediate_size"},
            optional=True,
        ),
    },
    layers=GraniteLayers(MIXERS, lambda settings: ["mamba"] * settings["num_hidden_layers"]),
    fields={
        **MODEL_FIELDS,
        "embedding_multiplier": Key("embedding_multiplier", 1.0),
        "logits_multiplier": Computed(
            read_logits_multiplier,
            lambda value, config, width: {"logits_scaling": round(1 / value, 12)},
        ),
    },
    expected={"hidden_act": "silu", "mamba_conv_bias": True},
    refused={"time_step_limit": [0.0, math.inf], "normalization_function": "rmsnorm"},
)
