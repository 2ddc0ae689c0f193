"""Mamba and Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..config.options.init import InitConfig
from ..config.options.mamba1 import Mamba1Options
from ..config.options.mamba2 import Mamba2Options
from .decoder import Decoder, Part
from .family import Settings, refuse, require
from .keys import Computed, EqualLayers, Field, Key, flag
from .names import Names, one_head, taps

INIT = InitConfig(weights="uniform", output="depth")

CONV_NAMES: Names = {"conv.taps": taps("conv1d.weight"), "conv.bias": "conv1d.bias"}
MAMBA1_NAMES: Names = {
    **CONV_NAMES,
    "input": "in_proj",
    "select": one_head("x_proj.weight"),
    "dt": one_head("dt_proj.weight"),
    "dt_bias": one_head("dt_proj.bias"),
    "A_log": one_head("A_log"),
    "D": one_head("D"),
    "output": "out_proj",
}
MAMBA2_NAMES: Names = {
    **CONV_NAMES,
    "input": "in_proj",
    "A_log": "A_log",
    "D": "D",
    "dt_bias": "dt_bias",
    "norm": "norm",
    "output": "out_proj",
}


def read_rank(settings: Mapping[str, Any]) -> int | None:
    rank = settings.get("time_step_rank", "auto")
    return None if rank == "auto" else int(rank)


def read_expand(settings: Mapping[str, Any]) -> int:
    expand = int(settings.get("expand", 2))
    inner, width = settings.get("intermediate_size"), settings["hidden_size"]
    if inner is None:
        return expand
    if inner % width:
        refuse("intermediate_size", f"{inner} is no multiple of hidden_size ({width})")
    return int(inner // width)


def require_grouped_norm(value: int | None, options: Mamba2Options, width: int = 0) -> Settings:
    """Require a gated norm in as many groups as B and C have; no key says it."""
    require(value in (None, options.groups), f"its gated norm has not {options.groups} groups")
    return {}


NORM_GROUPS = Computed(lambda settings: settings.get("norm_groups"), require_grouped_norm)
"""mamba_ssm trains the gated norm in as many groups as B and C have; transformers computes it in
one group before version 5.23. A folder is read as it was trained, unless `norm_groups`, which is
ours, says otherwise."""


def read_head_dim(settings: Mapping[str, Any]) -> int:
    dim = settings.get("mamba_d_head", "auto")
    if dim != "auto":
        return int(dim)
    inner = settings.get("mamba_d_ssm") or settings["mamba_expand"] * settings["hidden_size"]
    return int(inner // settings["mamba_n_heads"])


def mamba2_part(fields: Mapping[str, Field | str], *, optional: bool = False) -> Part:
    """Return Mamba-2 as Bamba, Granite and Falcon-H1 have it beside attention; `fields` are those
    in which they differ."""
    heads = Computed(
        read_head_dim,
        lambda value, options, width: {
            "mamba_n_heads": options.num_heads(width),
            "mamba_d_head": value,
        },
    )
    shared: Mapping[str, Field | str] = {
        "state_size": "mamba_d_state",
        "head_dim": heads,
        "groups": "mamba_n_groups",
        "norm_groups": NORM_GROUPS,
        "conv": "mamba_d_conv",
        "norm_eps": "rms_norm_eps",
    }
    return Part(
        options=Mamba2Options,
        module="mamba",
        names=MAMBA2_NAMES,
        norms={"norm": "input_layernorm"},
        fields={**shared, **fields},
        optional=optional,
    )


def backbone(
    model_type: str, models: str, part: Part, refused: Mapping[str, Any], **expected: Any
) -> Decoder:
    return Decoder(
        model_type=model_type,
        architecture=f"{model_type.capitalize()}ForCausalLM",
        models=models,
        parts={"mamba": part},
        layers=EqualLayers("mamba"),
        fields={
            "vocab_size": "vocab_size",
            "width": "hidden_size",
            "norm_eps": Key("layer_norm_epsilon", 1e-5),
            "tie_embeddings": flag("tie_word_embeddings", model_type == "mamba"),
        },
        fixed={"init": INIT},
        ends={"embedding": "backbone.embeddings", "norm": "backbone.norm_f", "head": "lm_head"},
        blocks="backbone.layers",
        expected={"hidden_act": "silu", "use_conv_bias": True, **expected},
        refused=refused,
        written={"residual_in_fp32": False},
    )


MAMBA = backbone(
    "mamba",
    "130M to 2.8B",
    Part(
        options=Mamba1Options,
        module="mixer",
        norms={"norm": "norm"},
        names=MAMBA1_NAMES,
        fields={
            "state_size": Key("state_size", 16),
            "expand": Computed(
                read_expand,
                lambda value, options, width: {
                    "expand": value,
                    "intermediate_size": value * width,
                },
            ),
            "conv": Key("conv_kernel", 4),
            "dt_rank": Computed(
                read_rank,
                lambda value, options, width: {"time_step_rank": options.rank(width)},
            ),
        },
    ),
    refused={},
    use_bias=False,
)
MAMBA2 = backbone(
    "mamba2",
    "130M to 2.7B",
    Part(
        options=Mamba2Options,
        module="mixer",
        norms={"norm": "norm"},
        names=MAMBA2_NAMES,
        fields={
            "state_size": "state_size",
            "head_dim": Computed(
                lambda settings: settings["head_dim"],
                lambda value, options, width: {
                    "head_dim": value,
                    "num_heads": options.expand * width // value,
                },
            ),
            "groups": "n_groups",
            "norm_groups": NORM_GROUPS,
            "expand": Key("expand", 2),
            "conv": Key("conv_kernel", 4),
            "norm_eps": Key("layer_norm_epsilon", 1e-5),
            "bias": flag("use_bias", False),
        },
    ),
    refused={
        "rms_norm": True,
        "norm_before_gate": True,
        "time_step_limit": [0.0, math.inf],
    },
)
