"""Llama and its kin: attention, then a SwiGLU or SwiGLU experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config.options.attention import AttentionOptions
from ..config.options.mlp import GLUOptions
from ..config.options.moe import MoEOptions
from .decoder import MODEL_FIELDS, Decoder, Part
from .keys import Computed, EqualLayers, Field, Key, LayerTypes, Rotary, flag
from .names import Names, experts, gated_experts


def kv_heads(default: int | None) -> Computed:
    """Return the field for a class with this default; None means as many as queries have."""
    return Computed(
        lambda settings: (
            settings.get("num_key_value_heads", default) or settings["num_attention_heads"]
        ),
        lambda value, options, width: {"num_key_value_heads": value or options.heads},
    )


HEADS: Mapping[str, Field | str] = {
    "heads": "num_attention_heads",
    "kv_heads": kv_heads(None),
    "rope": Rotary(),
}
BIAS = flag("attention_bias", False)
ATTENTION: Names = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "out": "o_proj",
    "q_norm": "q_norm",
    "k_norm": "k_norm",
    "sinks": "sinks",
}
GLU_NAMES: Names = {"gate_up": ("gate_proj", "up_proj"), "down": "down_proj"}
MIXER_NORM: Names = {"norm": "input_layernorm"}
MLP_NORM: Names = {"norm": "post_attention_layernorm"}
GLU = Part(
    options=GLUOptions,
    module="mlp",
    norms=MLP_NORM,
    names=GLU_NAMES,
    fields={"hidden": "intermediate_size"},
)


HEAD_DIM = Computed(
    lambda settings: settings.get("head_dim"),
    lambda value, options, width: {} if value is None else {"head_dim": value},
)
"""Of classes that read a key that their configuration does not list, and that must not be null."""


def head_dim(default: int) -> Computed:
    """Return the field for a class that does not derive the head size from the width."""
    return Computed(
        lambda settings: settings.get("head_dim") or default,
        lambda value, options, width: {"head_dim": options.dim(width)},
    )


def attention(
    fields: Mapping[str, Field | str],
    *,
    norms: Names = MIXER_NORM,
    optional: bool = False,
    **fixed: Any,
) -> Part:
    return Part(
        options=AttentionOptions,
        module="self_attn",
        norms=norms,
        names=ATTENTION,
        fields={**HEADS, **fields},
        fixed=fixed,
        optional=optional,
    )


LLAMA = Decoder(
    model_type="llama",
    architecture="LlamaForCausalLM",
    models="Llama 1 to 3.3, 1B to 405B",
    parts={
        "attention": attention(
            {"head_dim": Key("head_dim", None), "qkv_bias": BIAS, "output_bias": BIAS}
        ),
        "glu": GLU,
    },
    layers=EqualLayers("attention/glu"),
    expected={"hidden_act": "silu", "mlp_bias": False},
    refused={"pretraining_tp": 1},
)


MIXTRAL = Decoder(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    models="8x7B, 8x22B",
    parts={
        "attention": attention(
            {
                "kv_heads": kv_heads(8),
                "head_dim": Key("head_dim", None),
                "rope": Rotary(base=1e6),
                "window": Key("sliding_window", None),
            }
        ),
        "moe": Part(
            options=MoEOptions,
            module="block_sparse_moe",
            norms=MLP_NORM,
            names={
                "router": "gate",
                "gate_up": gated_experts("experts.*.w1.weight", "experts.*.w3.weight"),
                "down": experts("experts.*.w2.weight"),
            },
            fields={
                "hidden": "intermediate_size",
                "experts": "num_local_experts",
                "top_k": "num_experts_per_tok",
                "balance_loss": Key("router_aux_loss_coef", 0.0),
                "normalize": Computed(
                    lambda settings: True if settings["num_experts_per_tok"] == 1 else None,
                    lambda value, options, width: {},
                ),
            },
        ),
    },
    layers=EqualLayers("attention/moe"),
    fields={**MODEL_FIELDS, "norm_eps": Key("rms_norm_eps", 1e-5)},
    expected={"hidden_act": "silu"},
    refused={"router_jitter_noise": 0.0},
)


def read_window(settings: Mapping[str, Any]) -> int | None:
    window: int | None = settings.get("sliding_window", 4096)
    return window


class WindowedLayers(LayerTypes):
    """Layer types that count only with `use_sliding_window`."""

    def read(self, settings: Mapping[str, Any]) -> Sequence[str]:
        if settings.get("use_sliding_window") and read_window(settings) is not None:
            return super().read(settings)
        return [self.types["full_attention"]] * settings["num_hidden_layers"]


def derive_windows(settings: Mapping[str, Any]) -> list[str]:
    """Return the layer types for a file without them: windows from a layer on."""
    first = settings.get("max_window_layers", 28)
    return [
        "sliding_attention" if number >= first else "full_attention"
        for number in range(settings["num_hidden_layers"])
    ]


WINDOW = Computed(
    read_window,
    lambda value, options, width: {"sliding_window": value, "use_sliding_window": True},
)


def qwen(model_type: str, models: str, fields: Mapping[str, Field | str], **fixed: Any) -> Decoder:
    fields = {"kv_heads": kv_heads(32), "head_dim": HEAD_DIM, **fields}
    return Decoder(
        model_type=model_type,
        architecture=f"{model_type.capitalize()}ForCausalLM",
        models=models,
        parts={
            "attention": attention(fields, optional=True, window=None, **fixed),
            "sliding": attention({**fields, "window": WINDOW}, optional=True, **fixed),
            "glu": GLU,
        },
        layers=WindowedLayers(
            {"full_attention": "attention/glu", "sliding_attention": "sliding/glu"}, derive_windows
        ),
        expected={"hidden_act": "silu"},
    )


QWEN2 = qwen("qwen2", "Qwen2 and 2.5, 0.5B to 72B", {}, qkv_bias=True)
QWEN3 = qwen(
    "qwen3",
    "0.6B to 32B",
    {
        "head_dim": head_dim(128),
        "qkv_bias": BIAS,
        "output_bias": BIAS,
        "qk_norm_eps": Key("rms_norm_eps", 1e-6),
    },
    qk_norm=True,
)
