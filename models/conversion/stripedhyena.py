"""Evo 1 and StripedHyena-7B: folders of togethercomputer's code, with `hyena_layer_idxs` in
`config.json`; `pytorch_model*.bin` or safetensors. Only read.

Differences from our tensors:

    filter.poles, filter.residues   complex numbers [channels, N, 1, 2]: h_t = Re Σ R_n · p_n^t.
                                    Ours are rates and angles, λ = −log p, so they are rounded
    short_filter_weight             the current token comes last
    projections, short filter       with `column_split_hyena`, head by head: its q, its k, its v
    inner_mha_cls.Wqkv              q, k and v, as ours
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..config.config import ModelConfig
from ..config.options.attention import AttentionOptions
from ..config.options.base import OperatorOptions
from ..config.options.hyena_li import HyenaLIOptions
from ..config.options.init import InitConfig
from ..config.options.mlp import GLUOptions
from ..config.options.rope import Rope
from .family import Published, build_pattern, expect, refuse
from .rules import Rule, map_rows, map_same

PREFIX = "backbone."
"""Module of the published models; the code's own checkpoints lack it."""


@dataclass(frozen=True)
class StripedHyena:
    """StripedHyena 1."""

    heads: int = 1
    """Attention heads, by which rows are split."""
    column_split: bool = True
    """True if rows of q, k and v alternate head by head."""

    @property
    def published(self) -> Published:
        return Published(
            family="StripedHyena",
            models="Evo 1 7B (8k, 131k), Evo 1.5, StripedHyena-Hessian-7B and -Nous-7B",
            operators=("hyena-li", "attention", "glu"),
            files="config.json, .safetensors or .bin",
            writes=False,
            tested_with="the published code's equations, written out",
        )

    def read(self, settings: Mapping[str, Any]) -> ModelConfig:
        expect(settings, hyena_filter_groups=1, smeared_gqa=False, short_filter_bias=True)
        expect(settings, num_filters=settings["hidden_size"], final_norm=True)
        interpolated = settings.get("use_interpolated_rotary_pos_emb", False)
        factor = float(settings.get("rotary_emb_scaling_factor", 1.0)) if interpolated else 1.0
        heads, kv_groups = settings["num_attention_heads"], settings.get("proj_groups", 1)
        operators: dict[str, OperatorOptions] = {
            "li": HyenaLIOptions(
                state_size=settings["state_size"],
                poles="complex",
                rates="plain",
                featurizer=settings["short_filter_length"],
                qkv_bias=True,
                featurizer_bias=True,
            ),
            "attention": AttentionOptions(
                heads=heads,
                kv_heads=heads // kv_groups,
                rope=Rope(
                    base=float(settings.get("rotary_emb_base", 10_000)),
                    scaling="linear" if factor != 1 else "none",
                    factor=factor,
                ),
                qkv_bias=settings.get("qkv_proj_bias", True),
                output_bias=settings.get("mha_out_proj_bias", True),
            ),
            "glu": GLUOptions(
                hidden=read_hidden(settings), activation=settings.get("mlp_activation", "silu")
            ),
        }
        inside = settings.get("use_flash_rmsnorm", False)  # this norm has eps inside the root
        return ModelConfig(
            vocab_size=settings["vocab_size"],
            width=settings["hidden_size"],
            **build_pattern(list_layers(settings), operators, mlp="glu"),
            norm="rms" if inside else "rms-eps-outside",
            norm_eps=float(settings["eps"]),
            tie_embeddings=settings["tie_embeddings"],
            init=InitConfig(weights="small", output="wang"),
        )

    def rules(self, config: ModelConfig) -> list[Rule]:
        rules = [
            map_same("embedding.weight", "embedding_layer.weight"),
            map_same("norm.weight", "norm.scale"),
        ]
        if not config.tie_embeddings:
            rules.append(map_same("head.weight", "unembed.weight"))
        for number, layer in enumerate(config.layers):
            ours = theirs = f"blocks.{number}"
            glu = config.operators[layer.mlp or ""]
            assert isinstance(glu, GLUOptions)
            gate_up = {f"{theirs}.mlp.{name}.weight": glu.hidden for name in ("l1", "l2")}
            rules += [
                map_same(f"{ours}.mixer.norm.weight", f"{theirs}.pre_norm.scale"),
                map_same(f"{ours}.mlp.norm.weight", f"{theirs}.post_norm.scale"),
                map_rows(f"{ours}.mlp.operator.gate_up.weight", gate_up),
                map_same(f"{ours}.mlp.operator.down.weight", f"{theirs}.mlp.l3.weight"),
            ]
            options = config.operators[layer.mixer]
            if isinstance(options, AttentionOptions):
                rules += attention_rules(f"{ours}.mixer.operator", theirs, options)
            else:
                rules += self.hyena_rules(f"{ours}.mixer.operator", theirs)
        prefixed = []
        for rule in rules:
            names = tuple(f"{PREFIX}{name}" for name in rule.theirs)
            prefixed.append(replace(rule, theirs=names, prefixes=(PREFIX, "")))
        return prefixed

    def hyena_rules(self, ours: str, theirs: str) -> list[Rule]:
        filter_name = f"{theirs}.filter"

        def group(t: Tensor) -> Tensor:
            """Return the rows of q, then of k, then of v."""
            if not self.column_split:
                return t
            heads: Tensor = t.unflatten(0, (self.heads, 3, -1))
            return heads.transpose(0, 1).flatten(0, 2)

        return [
            *(
                map_read(f"{ours}.qkv.{kind}", f"{theirs}.projections.{kind}", group)
                for kind in ("weight", "bias")
            ),
            map_read(
                f"{ours}.featurizer.taps",
                f"{filter_name}.short_filter_weight",
                lambda t: group(t).squeeze(1).flip(-1),
            ),
            map_read(f"{ours}.featurizer.bias", f"{filter_name}.short_filter_bias", group),
            map_same(f"{ours}.skip", f"{filter_name}.D"),
            map_read(f"{ours}.rates", f"{filter_name}.poles", lambda t: -log_poles(t).real),
            map_read(f"{ours}.angles", f"{filter_name}.poles", lambda t: log_poles(t).imag),
            map_read(f"{ours}.residues", f"{filter_name}.residues", lambda t: t[:, :, 0, 0]),
            map_read(f"{ours}.residues_i", f"{filter_name}.residues", lambda t: t[:, :, 0, 1]),
            *(
                map_same(f"{ours}.output.{kind}", f"{theirs}.out_filter_dense.{kind}")
                for kind in ("weight", "bias")
            ),
        ]


def select_layout(settings: Mapping[str, Any]) -> StripedHyena:
    """Return the format in the layout that the settings name."""
    heads = int(settings["num_attention_heads"])
    return StripedHyena(heads, bool(settings.get("column_split_hyena", True)))


def attention_rules(ours: str, theirs: str, options: AttentionOptions) -> list[Rule]:
    result = []
    for name, stored, biased in (
        ("qkv", "Wqkv", options.qkv_bias),
        ("out", "out_proj", options.output_bias),
    ):
        for kind in ("weight", "bias") if biased else ("weight",):
            result.append(
                map_same(f"{ours}.{name}.{kind}", f"{theirs}.inner_mha_cls.{stored}.{kind}")
            )
    return result


def map_read(ours: str, theirs: str, restore: Callable[[Tensor], Tensor]) -> Rule:
    """Map a tensor that is only read."""
    return Rule(ours, (theirs,), cannot_write, lambda ts: restore(ts[0]))


def cannot_write(tensor: Tensor) -> NoReturn:
    raise AssertionError("StripedHyena 1 is only read")


def log_poles(t: Tensor) -> Tensor:
    """Return log p [channels, N], complex64, for p [channels, N, 1, 2]; computed in double."""
    if t.is_meta:
        return torch.empty(t.shape[:2], dtype=torch.complex64, device="meta")
    return torch.view_as_complex(t[:, :, 0].double().contiguous()).log().to(torch.complex64)


def read_hidden(settings: Mapping[str, Any]) -> int:
    """Return the width of the MLPs; 8/3 of the model's, rounded up, without `inner_mlp_size`."""
    if settings.get("inner_mlp_size") is not None:
        return int(settings["inner_mlp_size"])
    multiple = int(settings.get("inner_size_multiple_of", 64))
    multiple *= int(settings.get("model_parallel_size", 1))
    return -(-int(2 * settings["hidden_size"] * 4 / 3) // multiple) * multiple


def list_layers(settings: Mapping[str, Any]) -> Sequence[str]:
    """List the mixers; StripedHyena-7B names a layer more than it has."""
    attention, hyena = settings["attn_layer_idxs"], settings["hyena_layer_idxs"]
    numbers = range(settings["num_layers"])
    missing = [number for number in numbers if number not in (*attention, *hyena)]
    if missing:
        refuse("hyena_layer_idxs", f"names no kind for the layers {missing}")
    return ["attention" if number in attention else "li" for number in numbers]
