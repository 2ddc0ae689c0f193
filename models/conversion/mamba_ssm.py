"""mamba_ssm folders (state-spaces): `config.json` without `model_type`, `pytorch_model.bin`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...console.errors import ConfigProblem, ConfigProblems
from ..config.config import ModelConfig
from ..config.options.base import OperatorOptions
from ..config.options.mamba1 import Mamba1Options
from ..config.options.mamba2 import Mamba2Options
from .family import TRANSFORMERS, Published, build_pattern, expect
from .mamba import INIT, MAMBA, MAMBA2
from .rules import Rule

IGNORED = {
    *("layer", "chunk_size", "use_mem_eff_path", "use_fast_path", "A_init_range", "conv_init"),
    *("dt_min", "dt_max", "dt_init_floor", "dt_init", "dt_scale"),
}
"""`ssm_cfg` keys that choose a kernel or initial weights."""


class MambaSSM:
    """Mamba and Mamba-2. Mamba-2's gated norm has as many groups as B and C."""

    published = Published(
        family="mamba_ssm",
        models="state-spaces: 130M to 2.8B",
        operators=("mamba1", "mamba2"),
        files="config.json, pytorch_model.bin",
        writes=False,
        tested_with=f"{TRANSFORMERS}: MambaForCausalLM",
    )

    def read(self, settings: Mapping[str, Any]) -> ModelConfig:
        expect(settings, rms_norm=True, attn_layer_idx=[], d_intermediate=0)
        scan = dict(settings["ssm_cfg"])
        layer = scan.get("layer", "Mamba1")
        if layer not in ("Mamba1", "Mamba2"):
            message = f"`{layer}` is not supported, only Mamba1 and Mamba2"
            raise ConfigProblems([ConfigProblem("ssm_cfg.layer", message)])
        options, known = read_mamba1(scan) if layer == "Mamba1" else read_mamba2(scan)
        unknown = sorted(scan.keys() - known - IGNORED)
        if unknown:
            raise ConfigProblems(
                [ConfigProblem(f"ssm_cfg.{key}", "is not supported") for key in unknown]
            )
        multiple = settings.get("pad_vocab_size_multiple", 8)
        return ModelConfig(
            vocab_size=-(-settings["vocab_size"] // multiple) * multiple,
            width=settings["d_model"],
            **build_pattern(["mamba"] * settings["n_layer"], {"mamba": options}),
            tie_embeddings=settings.get("tie_embeddings", True),
            init=INIT,
        )

    def rules(self, config: ModelConfig) -> list[Rule]:
        family = MAMBA if isinstance(config.operators["mamba"], Mamba1Options) else MAMBA2
        ends = {**family.ends, "embedding": "backbone.embedding"}
        return replace(family, ends=ends).rules(config)


def read_mamba1(scan: Mapping[str, Any]) -> tuple[OperatorOptions, set[str]]:
    """Return the options, and the keys that decide them."""
    expect(scan, conv_bias=True, bias=False)
    rank = scan.get("dt_rank", "auto")
    options = Mamba1Options(
        state_size=scan.get("d_state", 16),
        expand=scan.get("expand", 2),
        conv=scan.get("d_conv", 4),
        dt_rank=None if rank == "auto" else rank,
    )
    return options, {"conv_bias", "bias", "d_state", "expand", "d_conv", "dt_rank"}


def read_mamba2(scan: Mapping[str, Any]) -> tuple[OperatorOptions, set[str]]:
    """Return the options, and the keys that decide them."""
    fixed: dict[str, Any] = {
        "conv_bias": True,
        "D_has_hdim": False,
        "rmsnorm": True,
        "norm_before_gate": False,
        "dt_limit": [0.0, math.inf],
        "d_ssm": None,
    }
    expect(scan, **fixed)
    options = Mamba2Options(
        state_size=scan.get("d_state", 128),
        head_dim=scan.get("headdim", 64),
        groups=scan.get("ngroups", 1),
        expand=scan.get("expand", 2),
        conv=scan.get("d_conv", 4),
        bias=scan.get("bias", False),
    )
    return options, {*fixed, "d_state", "headdim", "ngroups", "expand", "d_conv", "bias"}
