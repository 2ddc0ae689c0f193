"""LFM3: gated short convolutions, or attention with or without a window and a gate for each head;
then a SwiGLU. Norms stand on both sides of an operator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..config.options.attention import AttentionOptions
from ..config.options.rope import Rope
from .decoder import Decoder
from .family import Settings, read_typed_rope, refuse, require, write_typed_rope
from .keys import Computed, Field, Key, LayerTypes, flag, implied
from .lfm import LFM2
from .llama import ATTENTION as NAMES
from .llama import BIAS, head_dim, kv_heads
from .names import Names, Target
from .rules import Rule, map_rows

DEFAULT_ROPES: Mapping[str, Mapping[str, Any]] = {
    "sliding_attention": {"rope_theta": 1e4},
    "full_attention": {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.5,
    },
}


@dataclass(frozen=True)
class TypedRotary:
    """Rotary positions, which `rope_parameters` lists by the layers' type."""

    kind: str

    def read(self, settings: Mapping[str, Any]) -> Rope:
        ropes = settings.get("rope_parameters") or DEFAULT_ROPES
        if self.kind not in ropes:
            raise KeyError(f"rope_parameters.{self.kind}")
        length = settings.get("max_position_embeddings") or 128_000
        return read_typed_rope(ropes[self.kind], {"max_position_embeddings": length})

    def write(self, value: Rope | None, holder: AttentionOptions, width: int) -> Settings:
        require(value is not None, "its attention has no rotary positions")
        assert value is not None
        settings = write_typed_rope(value, holder.dim(width))
        parameters = {
            **(settings["rope_scaling"] or {"rope_type": "default"}),
            "rope_theta": settings["rope_theta"],
        }
        length = settings["max_position_embeddings"]
        return {"max_position_embeddings": length, "rope_parameters": {self.kind: parameters}}


def read_bias(settings: Mapping[str, Any]) -> bool:
    bias = bool(settings.get("attention_bias", False))
    if bias and settings.get("use_attention_gate", True):
        refuse("attention_bias", "is not supported with use_attention_gate, whose gates have none")
    return bias


def projection_rows(target: Target) -> Rule:
    """Return the rule of queries, keys, values and, if there are any, gates."""
    rows = target.parts("qkv").items()
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "gate": "gate_proj"}
    return map_rows(target.ours, {target.name(names[part]): count for part, count in rows})


def derive_types(settings: Mapping[str, Any]) -> list[str]:
    kinds = {0: "sliding_attention", 2: "full_attention"}
    numbers = range(settings["num_hidden_layers"])
    return [kinds.get(number % 4, "conv") if number else "conv" for number in numbers]


CONV, ATTENTION, GLU = (LFM2.parts[name] for name in ("conv", "attention", "glu"))
MIXER_NORMS: Names = {"norm": "operator_norm", "post_norm": "post_operator_norm"}
PLACEMENT: Mapping[str, Field | str] = {
    "norm_placement": Computed(
        lambda settings: "both" if settings.get("use_sandwich_norm", True) else "pre",
        lambda value, options, width: {"use_sandwich_norm": value == "both"},
    )
}
FIELDS: Mapping[str, Field | str] = {
    **ATTENTION.fields,
    **PLACEMENT,
    "kv_heads": kv_heads(4),
    "head_dim": head_dim(128),
    "qkv_bias": Computed(read_bias, lambda value, options, width: {"attention_bias": value}),
    "output_bias": BIAS,
    "output_gate": flag("use_attention_gate", True),
    "output_gate_per": implied(
        lambda settings: "head" if settings.get("use_attention_gate", True) else "channel"
    ),
}
FULL = replace(
    ATTENTION,
    norms=MIXER_NORMS,
    names={**NAMES, "qkv": projection_rows},
    fields={**FIELDS, "rope": TypedRotary("full_attention")},
    fixed={"qk_norm": True, "window": None},
)
SLIDING = replace(
    FULL,
    fields={
        **FIELDS,
        "rope": TypedRotary("sliding_attention"),
        "window": Computed(
            lambda settings: settings.get("sliding_window", 256),
            lambda value, options, width: {"sliding_window": value},
        ),
    },
    fixed={"qk_norm": True},
)

LFM3 = Decoder(
    model_type="lfm3",
    architecture="Lfm3ForCausalLM",
    models="1.7B",
    parts={
        "conv": replace(
            CONV,
            norms=MIXER_NORMS,
            fields={**CONV.fields, **PLACEMENT, "taps": Key("conv_L_cache", 7)},
        ),
        "attention": FULL,
        "sliding": SLIDING,
        "glu": replace(
            GLU,
            norms={"norm": "ffn_norm", "post_norm": "post_ffn_norm"},
            fields={**PLACEMENT, "hidden": "intermediate_size"},
        ),
    },
    layers=LayerTypes(
        {
            "conv": "conv/glu",
            "full_attention": "attention/glu",
            "sliding_attention": "sliding/glu",
        },
        derive_types,
    ),
    fields={**LFM2.fields, "tie_embeddings": flag("tie_word_embeddings", True)},
    ends=LFM2.ends,
    expected={"conv_bias": False},
)
