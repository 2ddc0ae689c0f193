"""Mamba and Mamba-2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..config.config import ModelConfig
from ..config.options.base import OperatorOptions
from ..config.options.init import InitConfig
from ..config.options.mamba1 import Mamba1Options
from ..config.options.mamba2 import Mamba2Options
from .family import Settings, expect, require, require_equal_layers, require_plain_decoder
from .rules import Rule, map_ends, map_reshaped, map_same, map_taps

INIT = InitConfig(weights="uniform", output="depth")


class MambaFamily:
    architecture = "MambaForCausalLM"

    def read(self, settings: Mapping[str, Any]) -> ModelConfig:
        expect(settings, hidden_act="silu", use_bias=False, use_conv_bias=True)
        rank = settings.get("time_step_rank", "auto")
        options = Mamba1Options(
            state_size=settings.get("state_size", 16),
            expand=settings.get("expand", 2),
            conv=settings.get("conv_kernel", 4),
            dt_rank=None if rank == "auto" else rank,
        )
        return read_backbone(settings, options)

    def write(self, config: ModelConfig) -> Settings:
        require_equal_layers(config, Mamba1Options, None)
        options = config.operators[config.layers[0].mixer]
        assert isinstance(options, Mamba1Options)
        require(options.heads == 1, "its Mamba has several heads")
        return {
            **write_backbone(config),
            "model_type": "mamba",
            "state_size": options.state_size,
            "expand": options.expand,
            "intermediate_size": options.expand * config.width,
            "conv_kernel": options.conv,
            "time_step_rank": options.rank(config.width),
            "use_bias": False,
            "use_conv_bias": True,
        }

    def rules(self, config: ModelConfig) -> list[Rule]:
        return backbone_rules(config)


class Mamba2Family:
    """transformers' Mamba-2.

    mamba_ssm trains the gated norm in as many groups as B and C have; transformers computes it in
    one group. A folder is read as it was trained. `norm_groups`, which is ours, says otherwise.
    """

    architecture = "Mamba2ForCausalLM"

    def read(self, settings: Mapping[str, Any]) -> ModelConfig:
        expect(
            settings,
            hidden_act="silu",
            use_conv_bias=True,
            rms_norm=True,
            norm_before_gate=True,
            time_step_limit=[0.0, math.inf],
        )
        options = Mamba2Options(
            state_size=settings["state_size"],
            head_dim=settings["head_dim"],
            groups=settings["n_groups"],
            norm_groups=settings.get("norm_groups"),
            expand=settings.get("expand", 2),
            conv=settings.get("conv_kernel", 4),
            norm_eps=settings.get("layer_norm_epsilon", 1e-5),
            bias=settings.get("use_bias", False),
        )
        return read_backbone(settings, options)

    def write(self, config: ModelConfig) -> Settings:
        require_equal_layers(config, Mamba2Options, None)
        options = config.operators[config.layers[0].mixer]
        assert isinstance(options, Mamba2Options)
        # In transformers the gated norm has one group, and all norms have one eps.
        require((options.norm_groups or options.groups) == 1, "its gated norm has groups")
        one_group = {"norm_groups": 1} if options.groups > 1 else {}
        require(options.norm_eps == config.norm_eps, "its norms have different eps")
        return {
            **write_backbone(config),
            "model_type": "mamba2",
            "state_size": options.state_size,
            "expand": options.expand,
            "conv_kernel": options.conv,
            "num_heads": options.expand * config.width // options.head_dim,
            "head_dim": options.head_dim,
            "n_groups": options.groups,
            **one_group,
            "chunk_size": 256,
            "use_bias": options.bias,
            "use_conv_bias": True,
        }

    def rules(self, config: ModelConfig) -> list[Rule]:
        return backbone_rules(config)


def mamba1_rules(ours: str, theirs: str) -> list[Rule]:
    result = [
        map_same(f"{ours}.input.weight", f"{theirs}.in_proj.weight"),
        *conv_rules(ours, theirs),
    ]
    for our_name, their_name in (
        ("select", "x_proj.weight"),
        ("dt", "dt_proj.weight"),
        ("dt_bias", "dt_proj.bias"),
        ("A_log", "A_log"),
        ("D", "D"),
    ):
        result.append(map_one_head(f"{ours}.{our_name}", f"{theirs}.{their_name}"))
    return [*result, map_same(f"{ours}.output.weight", f"{theirs}.out_proj.weight")]


def mamba2_rules(ours: str, theirs: str, options: OperatorOptions) -> list[Rule]:
    assert isinstance(options, Mamba2Options)
    result = conv_rules(ours, theirs)
    for name in ("A_log", "D", "dt_bias"):
        result.append(map_same(f"{ours}.{name}", f"{theirs}.{name}"))
    result.append(map_same(f"{ours}.norm.weight", f"{theirs}.norm.weight"))
    for kind in ("weight", "bias") if options.bias else ("weight",):
        result.append(map_same(f"{ours}.input.{kind}", f"{theirs}.in_proj.{kind}"))
        result.append(map_same(f"{ours}.output.{kind}", f"{theirs}.out_proj.{kind}"))
    return result


def conv_rules(ours: str, theirs: str) -> list[Rule]:
    return [
        map_taps(f"{ours}.conv.taps", f"{theirs}.conv1d.weight"),
        map_same(f"{ours}.conv.bias", f"{theirs}.conv1d.bias"),
    ]


def map_one_head(ours: str, theirs: str) -> Rule:
    return map_reshaped(ours, theirs, lambda t: t.squeeze(0), lambda t: t.unsqueeze(0))


def read_backbone(settings: Mapping[str, Any], options: OperatorOptions) -> ModelConfig:
    return ModelConfig(
        vocab_size=settings["vocab_size"],
        width=settings["hidden_size"],
        pattern=f"[mamba] * {settings['num_hidden_layers']}",
        operators={"mamba": options},
        norm_eps=settings.get("layer_norm_epsilon", 1e-5),
        tie_embeddings=bool(settings.get("tie_word_embeddings", True)),
        init=INIT,
    )


def write_backbone(config: ModelConfig) -> Settings:
    require_plain_decoder(config)
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": len(config.layers),
        "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "hidden_act": "silu",
        "residual_in_fp32": False,
    }


def backbone_rules(config: ModelConfig, embedding: str = "embeddings") -> list[Rule]:
    result = map_ends(config, f"backbone.{embedding}.weight", "backbone.norm_f.weight")
    mixer_rules = []
    for number, layer in enumerate(config.layers):
        ours, theirs = f"blocks.{number}.mixer", f"backbone.layers.{number}"
        result.append(map_same(f"{ours}.norm.weight", f"{theirs}.norm.weight"))
        options = config.operators[layer.mixer]
        if isinstance(options, Mamba1Options):
            mixer_rules += mamba1_rules(f"{ours}.operator", f"{theirs}.mixer")
        else:
            mixer_rules += mamba2_rules(f"{ours}.operator", f"{theirs}.mixer", options)
    return result + mixer_rules
