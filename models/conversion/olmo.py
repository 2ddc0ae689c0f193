"""OLMo 2 and 3, and OLMo Hybrid: norms after the operators, and over all heads of q and k.

In OLMo Hybrid, layers of gated DeltaNet have their norms before, those of attention after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ..config.options.delta import DeltaOptions
from ..config.options.rope import Rope
from .decoder import MODEL_FIELDS, Decoder, Part
from .family import (
    Settings,
    read_rope,
    read_typed_rope,
    require,
    rope_settings,
    write_rope,
    write_typed_rope,
)
from .keys import Computed, EqualLayers, Field, Key, LayerTypes
from .llama import BIAS, GLU, HEAD_DIM, attention
from .names import Names, either, split_taps

POST_MIXER: Names = {"post_norm": "post_attention_layernorm"}
POST_MLP: Names = {"post_norm": "post_feedforward_layernorm"}
POST_GLU = replace(GLU, norms=POST_MLP, fixed={"norm_placement": "post"})
FIXED: Mapping[str, Any] = {"norm_placement": "post", "qk_norm": True, "qk_norm_over": "projection"}
FIELDS: Mapping[str, Field | str] = {
    "qkv_bias": BIAS,
    "output_bias": BIAS,
    "head_dim": HEAD_DIM,
    "qk_norm_eps": Key("rms_norm_eps", 1e-5),
}
EPS: Mapping[str, Field | str] = {"norm_eps": Key("rms_norm_eps", 1e-5)}


def post_attention(fields: Mapping[str, Field | str], **fixed: Any) -> Part:
    return attention({**FIELDS, **fields}, norms=POST_MIXER, optional=True, **FIXED, **fixed)


OLMO2 = Decoder(
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    models="1B, 7B, 13B, 32B",
    parts={"attention": post_attention({}), "glu": POST_GLU},
    layers=EqualLayers("attention/glu"),
    fields={**MODEL_FIELDS, **EPS},
    expected={"hidden_act": "silu"},
)


class SlidingRotary:
    """Rotary positions of layers with a window, which have the base of the others and no scaling
    (transformers 5 may list both by the layers' type)."""

    kind = "sliding_attention"

    def read(self, settings: Mapping[str, Any]) -> Rope:
        nested = dict(settings.get("rope_parameters") or {}).get(self.kind)
        rope = {"rope_theta": settings.get("rope_theta")} if nested is None else nested
        return read_typed_rope(rope, settings, base=5e5)

    def write(self, value: Rope | None, holder: Any, width: int) -> Settings:
        require(value is not None and value.scaling == "none", "its windows have scaled positions")
        assert value is not None
        settings = write_rope(value, holder.dim(width))
        return {key: settings[key] for key in ("rope_theta", "max_position_embeddings")}


class FullRotary(SlidingRotary):
    """Rotary positions of layers that see the whole past."""

    kind = "full_attention"

    def read(self, settings: Mapping[str, Any]) -> Rope:
        if self.kind in dict(settings.get("rope_parameters") or {}):
            return super().read(settings)
        return read_typed_rope(rope_settings(settings), settings, base=5e5)

    def write(self, value: Rope | None, holder: Any, width: int) -> Settings:
        require(value is not None, "its attention has no rotary positions")
        assert value is not None
        return write_typed_rope(value, holder.dim(width))


def derive_windows(settings: Mapping[str, Any]) -> Sequence[str]:
    return [
        "full_attention" if number % 4 == 3 else "sliding_attention"
        for number in range(settings["num_hidden_layers"])
    ]


OLMO3 = Decoder(
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    models="7B, 32B",
    parts={
        "attention": post_attention({"rope": FullRotary()}, window=None),
        "sliding": post_attention({"rope": SlidingRotary(), "window": Key("sliding_window", 4096)}),
        "glu": POST_GLU,
    },
    layers=LayerTypes(
        {"full_attention": "attention/glu", "sliding_attention": "sliding/glu"}, derive_windows
    ),
    fields={**MODEL_FIELDS, **EPS},
    expected={"hidden_act": "silu"},
)


class OptionalRotary:
    """Rotary positions, or none where the base is null, as in the published models."""

    def read(self, settings: Mapping[str, Any]) -> Rope | None:
        nested = dict(settings.get("rope_parameters") or {})
        return None if nested.get("rope_theta", 0) is None else read_rope(settings)

    def write(self, value: Rope | None, holder: Any, width: int) -> Settings:
        if value is not None:
            return write_rope(value, holder.dim(width))
        return {"rope_parameters": {"rope_type": "default", "rope_theta": None}}


def derive_types(settings: Mapping[str, Any]) -> Sequence[str]:
    count = settings["num_hidden_layers"]
    types = ["full_attention" if number % 4 == 3 else "linear_attention" for number in range(count)]
    return types if "full_attention" in types else [*types[:-1], "full_attention"]


def read_key_dim(settings: Mapping[str, Any]) -> int:
    heads = settings.get("linear_num_key_heads") or settings["num_attention_heads"]
    return int(settings.get("linear_key_head_dim") or 0.75 * settings["hidden_size"] / heads)


DELTA_NAMES: Names = {
    "input": ("q_proj", "k_proj", "v_proj", "g_proj", "a_proj", "b_proj"),
    "conv.taps": split_taps("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", of="input"),
    "dt_bias": "dt_bias",
    "A_log": "A_log",
    "norm": "o_norm",
    "output": "o_proj",
}

HYBRID_MLP: Names = {"norm": either("feedforward_layer_norm", "post_attention_layernorm")}
HYBRID_POST_MIXER: Names = {
    "post_norm": either("post_attention_layernorm", "feedforward_layer_norm")
}
"""transformers renames a norm of linear layers when it loads, and those of attention when it
saves."""

OLMO_HYBRID = Decoder(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    models="7B",
    parts={
        "delta": Part(
            options=DeltaOptions,
            module="linear_attn",
            names=DELTA_NAMES,
            norms={"norm": either("attention_layer_norm", "input_layernorm")},
            fields={
                "heads": Computed(
                    lambda settings: (
                        settings.get("linear_num_key_heads") or settings["num_attention_heads"]
                    ),
                    lambda value, options, width: {"linear_num_key_heads": value},
                ),
                "value_heads": Computed(
                    lambda settings: (
                        settings.get("linear_num_value_heads") or settings["num_attention_heads"]
                    ),
                    lambda value, options, width: {"linear_num_value_heads": options.state_heads},
                ),
                "key_head_dim": Computed(
                    read_key_dim, lambda value, options, width: {"linear_key_head_dim": value}
                ),
                "value_head_dim": Computed(
                    lambda settings: (
                        settings.get("linear_value_head_dim") or 2 * read_key_dim(settings)
                    ),
                    lambda value, options, width: {"linear_value_head_dim": value},
                ),
                "max_beta": Computed(
                    lambda settings: 2 if settings.get("linear_allow_neg_eigval", True) else 1,
                    lambda value, options, width: {"linear_allow_neg_eigval": value == 2},
                ),
                "conv": Key("linear_conv_kernel_dim", 4),
            },
        ),
        "attention": replace(
            post_attention({"rope": OptionalRotary(), "qk_norm_eps": Key("rms_norm_eps", 1e-6)}),
            norms=HYBRID_POST_MIXER,
        ),
        "glu": replace(GLU, norms=HYBRID_MLP),
        "glu_post": POST_GLU,
    },
    layers=LayerTypes(
        {"linear_attention": "delta/glu", "full_attention": "attention/glu_post"}, derive_types
    ),
    expected={"hidden_act": "silu"},
)
