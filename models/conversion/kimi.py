"""Kimi Linear: Kimi Delta Attention, or latent attention without positions; then a SwiGLU, or
experts with a shared one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config.options.delta import DeltaOptions
from ..config.options.mla import MLAOptions
from ..config.options.mlp import GLUOptions
from ..config.options.moe import MoEOptions
from .decoder import UNTIED, Decoder, Part
from .family import Settings, refuse, require
from .keys import Computed, Key, LayerTypes, flag
from .llama import GLU_NAMES, MIXER_NORM, MLP_NORM
from .mla import mla_names, mla_sizes
from .names import Target, experts, gated_experts, split_taps
from .rules import Rule, map_reshaped

EPS = Key("rms_norm_eps", 1e-5)


def linear(name: str, inner: str, default: int) -> Computed:
    """Return a field of KDA, which the published files nest in `linear_attn_config`."""
    return Computed(
        lambda settings: (
            dict(settings.get("linear_attn_config") or {}).get(inner) or settings.get(name, default)
        ),
        lambda value, options, width: {name: value},
    )


HEAD_DIM = linear("linear_head_dim", "head_dim", 128)


def shared_experts(key: str) -> Computed:
    """Return the width of the shared expert, which counts experts there."""

    def write(value: int | None, options: MoEOptions, width: int) -> Settings:
        count, rest = divmod(value or 0, options.hidden)
        require(count > 0 and not rest, "its shared expert is no multiple of an expert's width")
        return {key: count}

    return Computed(
        lambda settings: settings["moe_intermediate_size"] * settings.get(key, 1), write
    )


BALANCED: Mapping[str, Any] = {
    "router": "sigmoid",
    "router_bias": False,
    "router_fp32": True,
    "bias_update_rate": 0.0,
}
"""Options of experts that a bias balances, as in DeepSeek V3."""


def derive_mlp_types(settings: Mapping[str, Any]) -> Sequence[str]:
    dense = settings.get("first_k_dense_replace", 1)
    numbers = range(settings["num_hidden_layers"])
    return ["dense" if number < dense else "sparse" for number in numbers]


MLP_TYPES = LayerTypes({"sparse": "moe", "dense": "glu"}, derive_mlp_types, "mlp_layer_types")


NESTED = {"num_heads", "head_dim", "short_conv_kernel_size", "full_attn_layers", "kda_layers"}
"""Keys of `linear_attn_config`. Kimi K3 has more, which bound the decays, among others."""


class KimiLayers(LayerTypes):
    """Types of mixers, and of MLPs; the published files list mixers from 1, and count dense MLPs,
    which are first."""

    def read(self, settings: Mapping[str, Any]) -> Sequence[str]:
        for key in sorted(dict(settings.get("linear_attn_config") or {}).keys() - NESTED):
            refuse(f"linear_attn_config.{key}", "is not supported")
        mixers, mlps = super().read(settings), MLP_TYPES.read(settings)
        return [f"{mixer}/{mlp}" for mixer, mlp in zip(mixers, mlps, strict=True)]

    def write(self, layers: Sequence[str]) -> Settings:
        mlps = ["sparse" if layer.endswith("/moe") else "dense" for layer in layers]
        mixers = super().write([layer.partition("/")[0] for layer in layers])
        return {**mixers, "mlp_layer_types": mlps}


def derive_types(settings: Mapping[str, Any]) -> Sequence[str]:
    numbers = range(settings["num_hidden_layers"])
    full = dict(settings.get("linear_attn_config") or {}).get("full_attn_layers")
    attention = {n for n in numbers if n and n % 4 == 0} if full is None else {n - 1 for n in full}
    return ["full_attention" if n in attention else "linear_attention" for n in numbers]


def log_rates(target: Target) -> Rule:
    """Return the rule of A_log, which has dimensions for rows, tokens and channels there."""
    return map_reshaped(
        target.ours, target.name("A_log"), lambda t: t.view(1, 1, -1, 1), lambda t: t.flatten()
    )


KIMI_LINEAR = Decoder(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    models="48B-A3B",
    parts={
        "delta": Part(
            options=DeltaOptions,
            module="self_attn",
            norms=MIXER_NORM,
            names={
                "input": ("q_proj", "k_proj", "v_proj", "g_a_proj", "f_a_proj", "b_proj"),
                "conv.taps": split_taps(
                    "q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight", of="input"
                ),
                "decay_up": "f_b_proj",
                "gate_up": "g_b_proj",
                "dt_bias": "dt_bias",
                "A_log": log_rates,
                "norm": "o_norm",
                "output": "o_proj",
            },
            fields={
                "heads": linear("linear_num_heads", "num_heads", 32),
                "key_head_dim": HEAD_DIM,
                "value_head_dim": HEAD_DIM,
                "decay_rank": HEAD_DIM,
                "gate_rank": HEAD_DIM,
                "conv": linear("linear_conv_kernel_dim", "short_conv_kernel_size", 4),
                "norm_eps": EPS,
            },
            fixed={"decay": "channel", "gate": "sigmoid"},
            optional=True,
        ),
        "mla": Part(
            options=MLAOptions,
            module="self_attn",
            norms=MIXER_NORM,
            names=mla_names(interleaved=False),
            fields={**mla_sizes(32), "q_lora_rank": Key("q_lora_rank", None)},
            fixed={"rope": None},
            optional=True,
        ),
        "glu": Part(
            options=GLUOptions,
            module="mlp",
            also="block_sparse_moe",
            norms=MLP_NORM,
            names=GLU_NAMES,
            fields={"hidden": "intermediate_size"},
            optional=True,
        ),
        "moe": Part(
            options=MoEOptions,
            module="block_sparse_moe",
            also="mlp",
            norms=MLP_NORM,
            names={
                "router": "gate",
                "correction_bias": "gate.e_score_correction_bias",
                "gate_up": gated_experts("experts.*.w1.weight", "experts.*.w3.weight"),
                "down": experts("experts.*.w2.weight"),
                "shared.gate_up": ("shared_experts.gate_proj", "shared_experts.up_proj"),
                "shared.down": "shared_experts.down_proj",
            },
            fields={
                "experts": "num_experts",
                "top_k": "num_experts_per_token",
                "hidden": "moe_intermediate_size",
                "shared_hidden": shared_experts("num_shared_experts"),
                "groups": Key("num_expert_group", 1),
                "top_k_groups": Key("topk_group", 1),
                "normalize": flag("moe_renormalize", True),
                "routed_scaling_factor": Key("routed_scaling_factor", 2.446),
            },
            fixed=BALANCED,
            optional=True,
        ),
    },
    layers=KimiLayers({"linear_attention": "delta", "full_attention": "mla"}, derive_types),
    fields={**UNTIED, "norm_eps": EPS},
    fixed={"tie_embeddings": False},
    expected={"hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False},
    refused={
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "moe_layer_freq": 1,
        "pretraining_tp": 1,
        "mla_use_output_gate": False,
        "routed_expert_hidden_size": None,
        "attn_res_block_size": None,
    },
)
