"""Qwen3-Next and Qwen3.5: gated DeltaNet or gated attention, then a SwiGLU or experts.

Norms multiply by 1 + w. Queries and their gates alternate head by head; Qwen3-Next's projections of
gated DeltaNet stand group by group: the queries, keys, values and gates of a key head, and its β
and decays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..config.options.attention import AttentionOptions
from ..config.options.delta import DeltaOptions
from ..config.options.moe import MoEOptions
from .decoder import MODEL_FIELDS, Decoder, Part
from .family import Settings
from .keys import Key, LayerTypes, Rotary, flag
from .llama import ATTENTION, BIAS, GLU, MIXER_NORM, MLP_NORM, head_dim, kv_heads
from .names import Names, Rows, experts, gated_experts, or_stacked, reordered, taps

EPS = Key("rms_norm_eps", 1e-6)


def order_gates(rows: Rows, options: AttentionOptions) -> list[Tensor]:
    """Return the rows of q_proj, k_proj and v_proj: each head's queries, then its gates."""
    queries, gates = (rows[name].view(options.heads, -1) for name in ("q", "gate"))
    return [torch.cat([queries, gates], dim=1).flatten(), rows["k"], rows["v"]]


def order_groups(rows: Rows, options: DeltaOptions) -> list[Tensor]:
    """Return the rows of in_proj_qkvz and in_proj_ba, group by group."""
    return [
        torch.cat([rows[name].view(options.heads, -1) for name in names], dim=1).flatten()
        for names in (("q", "k", "v", "gate"), ("beta", "decay"))
    ]


def order_parts(rows: Rows, options: DeltaOptions) -> list[Tensor]:
    """Return the rows of Qwen3.5's projections."""
    qkv = torch.cat([rows[name] for name in ("q", "k", "v")])
    return [qkv, *(rows[name] for name in ("gate", "beta", "decay"))]


ATTENTION_PARTS = ("q_proj", "k_proj", "v_proj")
GATED_ATTENTION = Part(
    options=AttentionOptions,
    module="self_attn",
    norms=MIXER_NORM,
    names={
        **ATTENTION,
        "qkv": reordered(*ATTENTION_PARTS, of="qkv", order=order_gates),
    },
    fields={
        "heads": "num_attention_heads",
        "kv_heads": kv_heads(2),
        "head_dim": head_dim(256),
        "rope": Rotary(rotated=0.25, fixed=False, head_dim=256),
        "qkv_bias": BIAS,
        "output_bias": BIAS,
        "qk_norm_eps": EPS,
    },
    fixed={"output_gate": True, "qk_norm": True, "qk_norm_kind": "rms-zero-centered"},
    optional=True,
)
QWEN3_5_ATTENTION = replace(
    GATED_ATTENTION, fields={**GATED_ATTENTION.fields, "kv_heads": kv_heads(4)}
)
EXPERTS = Part(
    options=MoEOptions,
    module="mlp",
    norms=MLP_NORM,
    names={
        "router": "gate",
        "gate_up": or_stacked(
            gated_experts("experts.*.gate_proj.weight", "experts.*.up_proj.weight"),
            "experts.gate_up_proj",
        ),
        "down": or_stacked(experts("experts.*.down_proj.weight"), "experts.down_proj"),
        "shared.gate_up": ("shared_expert.gate_proj", "shared_expert.up_proj"),
        "shared.down": "shared_expert.down_proj",
        "shared_gate": "shared_expert_gate",
    },
    fields={
        "experts": "num_experts",
        "top_k": "num_experts_per_tok",
        "hidden": "moe_intermediate_size",
        "shared_hidden": "shared_expert_intermediate_size",
        "balance_loss": Key("router_aux_loss_coef", 0.0),
    },
    fixed={"shared_gate": True, "normalize": True},
)
QWEN3_NEXT_EXPERTS = replace(
    EXPERTS,
    fields={**EXPERTS.fields, "normalize": flag("norm_topk_prob", True)},
    fixed={"shared_gate": True},
    optional=True,
)


def delta_part(names: Names) -> Part:
    return Part(
        options=DeltaOptions,
        module="linear_attn",
        norms=MIXER_NORM,
        names={
            **names,
            "conv.taps": taps("conv1d.weight"),
            "dt_bias": "dt_bias",
            "A_log": "A_log",
            "norm": "norm",
            "output": "out_proj",
        },
        fields={
            "heads": Key("linear_num_key_heads", 16),
            "value_heads": Key("linear_num_value_heads", 32),
            "key_head_dim": Key("linear_key_head_dim", 128),
            "value_head_dim": Key("linear_value_head_dim", 128),
            "conv": Key("linear_conv_kernel_dim", 4),
            "norm_eps": EPS,
        },
        optional=True,
    )


GROUPED_DELTA = delta_part(
    {"input": reordered("in_proj_qkvz", "in_proj_ba", of="input", order=order_groups)}
)
DELTA_PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
DELTA = delta_part({"input": reordered(*DELTA_PROJECTIONS, of="input", order=order_parts)})


def derive_types(settings: Mapping[str, Any]) -> Sequence[str]:
    interval = settings.get("full_attention_interval", 4)
    return [
        "linear_attention" if (number + 1) % interval else "full_attention"
        for number in range(settings["num_hidden_layers"])
    ]


class SparseLayers(LayerTypes):
    """Layer types, and the numbers of the layers whose MLP has no experts."""

    def read(self, settings: Mapping[str, Any]) -> Sequence[str]:
        dense = settings.get("mlp_only_layers") or []
        step, has_experts = settings.get("decoder_sparse_step", 1), settings["num_experts"] > 0
        return [
            f"{mixer}/{'moe' if has_experts and i not in dense and (i + 1) % step == 0 else 'glu'}"
            for i, mixer in enumerate(super().read(settings))
        ]

    def write(self, layers: Sequence[str]) -> Settings:
        dense = [number for number, layer in enumerate(layers) if layer.endswith("/glu")]
        settings = super().write([layer.partition("/")[0] for layer in layers])
        settings |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
        return settings if len(dense) < len(layers) else {**settings, "num_experts": 0}


def qwen(
    model_type: str, architecture: str, models: str, parts: Mapping[str, Part], suffix: str = ""
) -> Decoder:
    kinds = {"linear_attention": f"delta{suffix}", "full_attention": f"attention{suffix}"}
    layers = (LayerTypes if suffix else SparseLayers)(kinds, derive_types)
    return Decoder(
        model_type=model_type,
        architecture=architecture,
        models=models,
        parts={"attention": GATED_ATTENTION, **parts},
        layers=layers,
        fields={**MODEL_FIELDS, "norm_eps": EPS},
        fixed={"norm": "rms-zero-centered"},
        expected={"hidden_act": "silu"},
        refused={"attn_output_gate": True, "output_gate_type": "swish"},
    )


QWEN3_NEXT = qwen(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    "80B-A3B",
    {"delta": GROUPED_DELTA, "moe": QWEN3_NEXT_EXPERTS, "glu": replace(GLU, optional=True)},
)
QWEN3_5 = qwen(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    "Qwen3.5 and 3.6: 0.8B, 2B, 4B, 9B, 27B",
    {"delta": DELTA, "glu": GLU, "attention": QWEN3_5_ATTENTION},
    suffix="/glu",
)
QWEN3_5_MOE = qwen(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    "Qwen3.5 and 3.6: 35B-A3B to 397B-A17B",
    {"delta": DELTA, "moe": EXPERTS},
    suffix="/moe",
)
