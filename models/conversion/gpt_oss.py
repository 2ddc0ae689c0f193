"""gpt-oss: attention with sinks, every second layer with a window, then experts with biases.

Experts clamp gates and ups, and their rows alternate: gate, up, gate, up. Their matrices are stored
transposed; in the published files they are MXFP4 (quantized.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ..config.options.moe import MoEOptions
from .decoder import MODEL_FIELDS, Decoder, Part
from .keys import Computed, Field, Key, LayerTypes, Rotary, flag
from .llama import MLP_NORM, attention, head_dim, kv_heads
from .names import Target
from .rules import Rule, map_reshaped


def alternate(t: Tensor) -> Tensor:
    """Map [experts, gates and ups, …] to rows that alternate."""
    parts: Tensor = t.unflatten(1, (2, -1))
    return parts.transpose(1, 2).flatten(1, 2)


def separate(t: Tensor) -> Tensor:
    """Map [experts, alternating rows, …] to gates, then ups."""
    pairs: Tensor = t.unflatten(1, (-1, 2))
    return pairs.transpose(1, 2).flatten(1, 2)


def expert_rows(target: Target) -> Rule:
    """Return the rule of the first matrices, or of their biases."""
    if target.ours.endswith("bias"):
        name = target.name("experts.gate_up_proj_bias")
        return map_reshaped(target.ours, name, alternate, separate)
    return map_reshaped(
        target.ours,
        target.name("experts.gate_up_proj"),
        lambda t: alternate(t).mT,
        lambda t: separate(t.mT),
    )


def transposed_experts(target: Target) -> Rule:
    name = target.name("experts.down_proj")
    return map_reshaped(target.ours, name, lambda t: t.mT, lambda t: t.mT)


BIAS = flag("attention_bias", True)
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
FIELDS: Mapping[str, Field | str] = {
    "kv_heads": kv_heads(8),
    "head_dim": head_dim(64),
    "rope": Rotary(base=150_000.0, default=YARN),
    "qkv_bias": BIAS,
    "output_bias": BIAS,
}
WINDOW = Computed(
    lambda settings: settings.get("sliding_window", 128),
    lambda value, options, width: {"sliding_window": value},
)


def derive_windows(settings: Mapping[str, Any]) -> Sequence[str]:
    return [
        "full_attention" if number % 2 else "sliding_attention"
        for number in range(settings["num_hidden_layers"])
    ]


GPT_OSS = Decoder(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    models="20B-A3.6B, 120B-A5.1B",
    parts={
        "attention": attention(FIELDS, optional=True, window=None, sinks=True),
        "sliding": attention({**FIELDS, "window": WINDOW}, optional=True, sinks=True),
        "moe": Part(
            options=MoEOptions,
            module="mlp",
            norms=MLP_NORM,
            names={
                "router": "router",
                "gate_up": expert_rows,
                "gate_up_bias": expert_rows,
                "down": transposed_experts,
                "down_bias": "experts.down_proj_bias",
            },
            fields={
                "experts": "num_local_experts",
                "top_k": "num_experts_per_tok",
                "hidden": "intermediate_size",
                "glu_limit": Key("swiglu_limit", 7.0),
                "balance_loss": Key("router_aux_loss_coef", 0.0),
            },
            fixed={
                "activation": "quick-gelu",
                "bias": True,
                "glu_offset": 1.0,
                "router_bias": True,
                "normalize": True,
            },
        ),
    },
    layers=LayerTypes(
        {"full_attention": "attention/moe", "sliding_attention": "sliding/moe"}, derive_windows
    ),
    fields={**MODEL_FIELDS, "norm_eps": Key("rms_norm_eps", 1e-5)},
    expected={"hidden_act": "silu", "swiglu_alpha": 1.702},
)
