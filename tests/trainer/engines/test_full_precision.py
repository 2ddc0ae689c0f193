"""Parameters that must not be rounded are fp32 in every engine of half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.configs import CONFIGS

from headrace.models.accounting.count import build_meta
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.model.model import Model
from headrace.models.operators import OPERATORS
from headrace.trainer.accounting.describe import describe, lines
from headrace.trainer.engines.groups import parameter_groups
from headrace.trainer.engines.optimizers.adamw import AdamWConfig

TINY = CONFIGS / "tiny.yaml"
NAMES = {
    *(f"blocks.2.mixer.operator.{name}" for name in ("rates", "residues")),
    *(f"blocks.3.mixer.operator.{name}" for name in ("A_log", "D", "dt_bias")),
}
ENGINES = ["deepspeed-1-bf16", "deepspeed-2-bf16", "deepspeed-3-bf16", "fsdp2-0-bf16"]


def test_operators_name_rates_decays_and_residues() -> None:
    model = build_meta(load_model_config(TINY))
    assert model.full_precision(PRECISIONS["bf16"]) == NAMES
    assert not model.full_precision(PRECISIONS["fp32"]), "all parameters are fp32 there"
    named = {name: set(kind.full_precision) for name, kind in OPERATORS.items()}
    assert named["mamba1"] == named["mamba2"] == {"A_log", "D", "dt_bias"}
    assert named["delta"] == {"A_log", "dt_bias"}
    assert all(named[kind] for kind in named if kind.startswith("hyena-li"))
    assert not any(named[kind] for kind in ("attention", "mla", "glu", "mlp", "hyena-se"))


def test_biases_that_balance_experts_are_named_where_they_exist() -> None:
    """bf16 would lose their small updates: 1 + 0.001 is 1 there."""
    assert OPERATORS["moe"].full_precision == ("correction_bias",)
    config = load_model_config(CONFIGS / "every.yaml")
    named = build_meta(config).full_precision(PRECISIONS["bf16"])
    balanced = [n for n, layer in enumerate(config.layers) if layer.mixer == "deepseek"]
    biases = {name for name in named if name.endswith("correction_bias")}
    assert biases == {f"blocks.{n}.mixer.operator.correction_bias" for n in balanced}
    assert len(biases) == 1, "the routers of `moe` and `oss` have none"


def test_a_run_in_fp32_has_the_groups_that_it_had() -> None:
    """Other groups would sum a norm in another order."""
    model = build_meta(load_model_config(TINY))
    plain = parameter_groups(model, AdamWConfig())
    assert parameter_groups(model, AdamWConfig(), model.full_precision(PRECISIONS["fp32"])) == plain
    apart = parameter_groups(model, AdamWConfig(), model.full_precision(PRECISIONS["bf16"]))
    assert {name for group in apart if group.full_precision for name in group.names} == NAMES
    assert {name for group in apart for name in group.names} == {
        name for group in plain for name in group.names
    }


@pytest.mark.slow
def test_every_engine_computes_with_the_masters(in_processes: Any) -> None:
    result = in_processes(2, "fp32_after_a_step", layouts=ENGINES, model="tiny")
    for layout, used in result.items():
        assert {name for name in used if "," not in name} == NAMES, layout
        assert all(used[name] for name in NAMES), (layout, used)
        # Negative control: one step later, bf16 would round each of them.
        assert not any(used[f"{name}, rounded"] for name in NAMES), (layout, used)


def test_a_model_that_samples_keeps_them() -> None:
    model = Model(load_model_config(TINY))
    model.cast(PRECISIONS["bf16"])
    formats = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {name for name, dtype in formats.items() if dtype == torch.float32} == NAMES
    assert set(formats.values()) == {torch.float32, torch.bfloat16}


def test_they_are_counted_and_shown(ask: Any) -> None:
    """Whole on each rank: a master, a gradient and two moments of 4 bytes."""
    words = ("processes=2", "device=cpu", "engine.kind=fsdp2")
    about = {item: describe(ask(*words, f"precision={item}")) for item in ("fp32", "bf16")}
    shown = {item: "\n".join(lines(description)) for item, description in about.items()}
    count = 2 * 36 * 16 + 3 * 6
    assert f"fp32         {count:,} parameters: blocks.*.hyena-li.rates, " in shown["bf16"]
    assert "fp32         " not in shown["fp32"]
    halves = about["fp32"]["memory"]["optimizer"], about["bf16"]["memory"]["optimizer"]
    assert halves[1] - halves[0] == 8 * count // 2
