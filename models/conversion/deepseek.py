"""DeepSeek V3: latent attention, then a SwiGLU in the first layers, in the others experts with a
shared one. The published files are FP8 (quantized.py)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..config.options.mla import MLAOptions
from ..config.options.moe import MoEOptions
from ..config.options.rope import Rope
from ..layers.rope import yarn_amplitude
from .decoder import Decoder, Part
from .family import Settings, read_rope, require, rope_settings, write_rope, yarn_mscale
from .keys import Computed, Key, flag
from .kimi import BALANCED, shared_experts
from .llama import GLU, MIXER_NORM, MLP_NORM
from .mla import mla_names, mla_sizes
from .names import experts, gated_experts


class DeepSeekRotary:
    """Rotary positions, and the factor of the scores, which yarn's `mscale_all_dim` says too."""

    def read(self, settings: Mapping[str, Any]) -> Rope:
        return read_rope(settings)

    def write(self, value: Rope | None, holder: MLAOptions, width: int) -> Settings:
        require(value is not None, "its attention has no rotary positions")
        assert value is not None
        settings = write_rope(value, holder.qk_rope_head_dim)
        log_factor = 0.1 * math.log(value.factor)
        scale = math.sqrt((holder.softmax_scale or 1.0) * holder.qk_head_dim**0.5)
        if holder.softmax_scale is None or math.isclose(scale, 1.0):
            return settings
        require(log_factor > 0, "its softmax_scale differs, and it has no yarn")
        scaling = settings["rope_scaling"]
        scaling["mscale_all_dim"] = round((scale - 1) / log_factor, 12)
        scaling["mscale"] = round((scale * yarn_amplitude(value) - 1) / log_factor, 12)
        scaling.pop("attention_factor", None)
        return settings


def read_scale(settings: Mapping[str, Any]) -> float | None:
    scaling = rope_settings(settings)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    mscale = float(scaling.get("mscale_all_dim") or 0.0)
    if kind == "default" or not mscale:
        return None
    dim = settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"]
    return float(yarn_mscale(float(scaling["factor"]), mscale) ** 2 * dim**-0.5)


@dataclass(frozen=True)
class DenseFirst:
    """Equal layers, of which the first have no experts."""

    def read(self, settings: Mapping[str, Any]) -> Sequence[str]:
        count = settings["num_hidden_layers"]
        dense = min(count, settings.get("first_k_dense_replace", 3))
        return ["mla/glu"] * dense + ["mla/moe"] * (count - dense)

    def write(self, layers: Sequence[str]) -> Settings:
        dense = layers.count("mla/glu")
        expected = ["mla/glu"] * dense + ["mla/moe"] * (len(layers) - dense)
        require(list(layers) == expected, "its layers without experts are not the first ones")
        return {"num_hidden_layers": len(layers), "first_k_dense_replace": dense}


DEEPSEEK_V3 = Decoder(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    models="V3, V3.1 and R1: 671B-A37B",
    parts={
        "mla": Part(
            options=MLAOptions,
            module="self_attn",
            norms=MIXER_NORM,
            names=mla_names(interleaved=True),
            fields={
                **mla_sizes(128),
                "q_lora_rank": Computed(
                    lambda settings: settings.get("q_lora_rank", 1536),
                    lambda value, options, width: {"q_lora_rank": value},
                ),
                "rope": DeepSeekRotary(),
                "softmax_scale": Computed(read_scale, lambda value, options, width: {}),
            },
        ),
        "glu": replace(GLU, optional=True),
        "moe": Part(
            options=MoEOptions,
            module="mlp",
            norms=MLP_NORM,
            names={
                "router": "gate",
                "correction_bias": "gate.e_score_correction_bias",
                "gate_up": gated_experts("experts.*.gate_proj.weight", "experts.*.up_proj.weight"),
                "down": experts("experts.*.down_proj.weight"),
                "shared.gate_up": ("shared_experts.gate_proj", "shared_experts.up_proj"),
                "shared.down": "shared_experts.down_proj",
            },
            fields={
                "experts": "n_routed_experts",
                "top_k": "num_experts_per_tok",
                "hidden": "moe_intermediate_size",
                "shared_hidden": shared_experts("n_shared_experts"),
                "groups": Key("n_group", 8),
                "top_k_groups": Key("topk_group", 4),
                "normalize": flag("norm_topk_prob", True),
                "routed_scaling_factor": Key("routed_scaling_factor", 2.5),
            },
            fixed=BALANCED,
            optional=True,
        ),
    },
    layers=DenseFirst(),
    expected={"hidden_act": "silu", "attention_bias": False, "rope_interleave": True},
    refused={
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "pretraining_tp": 1,
    },
    written={"num_nextn_predict_layers": 0},
)
