"""Nemotron-H and Nemotron 3 Nano: layers of one operator each, without positions.

A letter names each layer: M is Mamba-2, * attention, - an MLP with squared ReLU, E experts like it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ...console.errors import ConfigProblem, ConfigProblems
from ..config.options.attention import AttentionOptions
from ..config.options.mamba2 import Mamba2Options
from ..config.options.mlp import MLPOptions
from ..config.options.moe import MoEOptions
from .decoder import UNTIED, Decoder, Part
from .family import Settings, refuse, require
from .keys import Computed, Field, Key, flag, implied
from .llama import ATTENTION, head_dim, kv_heads
from .mamba import MAMBA2_NAMES, NORM_GROUPS
from .names import Names, experts

LETTERS = {"M": "mamba", "E": "moe", "*": "attention", "-": "mlp"}
TYPES = {"linear_attention": "M", "mamba": "M", "full_attention": "*", "attention": "*"}
TYPES |= {"moe": "E", "mlp": "-"}
NORM: Names = {"norm": "norm"}
EPS = Key("layer_norm_epsilon", 1e-5)


class LetterPattern:
    """The layers as letters, or in a list of types."""

    def read(self, settings: Mapping[str, Any]) -> Sequence[str]:
        letters: Sequence[str] | None = settings.get("hybrid_override_pattern")
        if letters is None:
            types = settings.get("layer_types") or settings["layers_block_type"]
            if types is None:
                raise KeyError("layers_block_type")
            letters = [TYPES.get(kind, kind) for kind in types]
        unknown = sorted(set(letters) - LETTERS.keys())
        if unknown:
            message = f"`{unknown[0]}` is not supported; known: {', '.join(LETTERS)}"
            raise ConfigProblems([ConfigProblem("hybrid_override_pattern", message)])
        return [LETTERS[letter] for letter in letters]

    def write(self, layers: Sequence[str]) -> Settings:
        letters = {name: letter for letter, name in LETTERS.items()}
        unknown = sorted(set(layers) - letters.keys())
        require(not unknown, f"it has no layer like `{', '.join(unknown)}`")
        pattern = "".join(letters[layer] for layer in layers)
        return {"num_hidden_layers": len(layers), "hybrid_override_pattern": pattern}


def older(name: str, old: str, default: Any) -> Key:
    return Key(name, default, older=(old,))


def activation(name: str) -> Computed:
    """Return the activation; `silu` and `relu2` have the same names."""
    return Computed(
        lambda settings: settings.get(name, "relu2"), lambda value, options, width: {name: value}
    )


def read_experts_bias(settings: Mapping[str, Any]) -> bool:
    if settings.get("mlp_bias"):
        refuse("mlp_bias", "is not supported with experts")
    return False


MLP_FIELDS: Mapping[str, Field | str] = {"activation": activation("mlp_hidden_act")}

NEMOTRON_H = Decoder(
    model_type="nemotron_h",
    architecture="NemotronHForCausalLM",
    models="Nemotron-H and Nano 2: 4B to 56B, Nemotron 3 Nano 30B-A3B",
    parts={
        "mamba": Part(
            options=Mamba2Options,
            module="mixer",
            names=MAMBA2_NAMES,
            norms=NORM,
            fields={
                "state_size": "ssm_state_size",
                "heads": Computed(
                    lambda settings: settings["mamba_num_heads"],
                    lambda value, options, width: {"mamba_num_heads": options.num_heads(width)},
                ),
                "head_dim": "mamba_head_dim",
                "groups": older("n_groups", "mamba_n_groups", 8),
                "norm_groups": NORM_GROUPS,
                "conv": older("conv_kernel", "mamba_d_conv", 4),
                "norm_eps": EPS,
                "bias": flag("use_bias", False),
            },
            optional=True,
        ),
        "attention": Part(
            options=AttentionOptions,
            module="mixer",
            names=ATTENTION,
            norms=NORM,
            fields={
                "heads": "num_attention_heads",
                "kv_heads": kv_heads(8),
                "head_dim": head_dim(128),
            },
            fixed={"rope": None},
            optional=True,
        ),
        "mlp": Part(
            options=MLPOptions,
            module="mixer",
            names={"up": "up_proj", "down": "down_proj"},
            norms=NORM,
            fields={**MLP_FIELDS, "hidden": "intermediate_size", "bias": flag("mlp_bias", False)},
            optional=True,
        ),
        "moe": Part(
            options=MoEOptions,
            module="mixer",
            names={
                "router": "gate",
                "correction_bias": "gate.e_score_correction_bias",
                "up": experts("experts.*.up_proj.weight"),
                "down": experts("experts.*.down_proj.weight"),
                "shared.up": "shared_experts.up_proj",
                "shared.down": "shared_experts.down_proj",
            },
            norms=NORM,
            fields={
                **MLP_FIELDS,
                "experts": "n_routed_experts",
                "top_k": "num_experts_per_tok",
                "hidden": "moe_intermediate_size",
                "shared_hidden": "moe_shared_expert_intermediate_size",
                "bias": implied(read_experts_bias),
                "groups": Key("n_group", 1),
                "top_k_groups": Key("topk_group", 1),
                "normalize": flag("norm_topk_prob", True),
                "routed_scaling_factor": Key("routed_scaling_factor", 1.0),
            },
            fixed={
                "gated": False,
                "router": "sigmoid",
                "router_bias": False,
                "router_fp32": True,
                "bias_update_rate": 0.0,
            },
            optional=True,
        ),
    },
    layers=LetterPattern(),
    fields={**UNTIED, "norm_eps": EPS},
    ends={"embedding": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"},
    blocks="backbone.layers",
    fixed={"tie_embeddings": False},
    expected={
        "use_conv_bias": True,
        "mamba_hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
    refused={
        "sliding_window": None,
        "moe_latent_size": None,
        "num_nextn_predict_layers": 0,
        "time_step_limit": [0.0, math.inf],
    },
    # transformers takes time_step_min as a lower bound of dt. The published models were trained
    # without one, but zero is impossible: its logarithm is taken.
    written={"time_step_min": 1e-30},
)
