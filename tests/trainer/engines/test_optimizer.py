from __future__ import annotations

import pytest
import torch
from torch import nn

from headrace.console.config import build as build_config
from headrace.models.config import ModelConfig
from headrace.models.model import Model
from headrace.models.operators import OPERATORS
from headrace.trainer.engines import optimizer
from headrace.trainer.engines.objective import Objective, parameters, undecayed
from headrace.trainer.engines.optimizer import OptimizerConfig


def test_matrices_decay_and_vectors_do_not() -> None:
    layer = nn.Linear(3, 2)
    named = dict(layer.named_parameters())
    built = optimizer.build(named, undecayed(layer), OptimizerConfig(lr=0.1))
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    built.step()
    assert torch.allclose(layer.weight, torch.full((2, 3), 1 - 0.1 * 0.1))
    assert torch.equal(layer.bias, torch.ones(2))


def test_moments_exist_before_the_first_update_and_are_live() -> None:
    parameter = nn.Parameter(torch.ones(4, 2))
    built = optimizer.build({"w": parameter}, (), OptimizerConfig())
    before = optimizer.moments(built, parameter)
    assert not any(moment.any() for moment in before.values())
    parameter.grad = torch.ones_like(parameter)
    built.step()
    assert torch.allclose(before["exp_avg"], torch.full((4, 2), 0.1))


def test_the_number_of_updates_decides_adams_correction() -> None:
    """A first update moves by lr whatever the gradient; a hundredth with fresh moments does not."""
    moved = []
    for updates in (0, 99):
        parameter = nn.Parameter(torch.zeros(1, 1))
        config = OptimizerConfig(lr=1.0, weight_decay=0.0)
        built = optimizer.build({"w": parameter}, (), config)
        optimizer.moments(built, parameter)
        optimizer.set_updates(built, updates)
        parameter.grad = torch.ones(1, 1)
        built.step()
        moved.append(float(-parameter.detach()))
    assert moved[0] == pytest.approx(1.0) and moved[1] == pytest.approx(0.1 / 0.05**0.5, rel=0.01)


def test_wrong_values_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"lr must be above 0, not -1; beta2 must be in \[0, 1\)"):
        OptimizerConfig(lr=-1, beta2=1)


KINDS: dict[str, dict[str, object]] = {
    "attention": {"heads": 2, "qkv_bias": True, "qk_norm": True},
    "mamba1": {"heads": 2, "state_size": 4},
    "mamba2": {"state_size": 4, "head_dim": 8},
    "hyena-se": {"groups": 4},
    "hyena-mr": {"groups": 4, "taps": 5, "filter_horizon": 16},
    "hyena-li": {"state_size": 2, "poles": "complex"},
    "hyena-li-freeform": {"filter_horizon": 16},
    "hyena-mlp": {"hidden": 24, "groups": 4},
    "mlp": {"hidden": 24, "bias": True},
    "glu": {"hidden": 24},
    "moe": {"experts": 2, "hidden": 8},
    "zamba-block": {"heads": 2, "hidden": 24, "lora_rank": 2},
}
SPARED = {
    "mamba1": {"dt_bias", "A_log", "D"},
    "hyena-li": {"rates", "angles", "residues", "residues_i"},
}
"""What has several dimensions and is not decayed all the same."""


def test_every_operator_spares_its_rates_and_gains_and_nothing_else() -> None:
    assert KINDS.keys() == OPERATORS.keys()
    for kind, options in KINDS.items():
        shared = kind == "zamba-block"
        config = build_config(
            ModelConfig,
            {
                "vocab_size": 11,
                "width": 16,
                "pattern": "[shared>other]" if shared else "[one/none]",
                "operators": {
                    "shared" if shared else "one": {"kind": kind, **options},
                    **({"other": {"kind": "hyena-se", "groups": 4}} if shared else {}),
                },
            },
            source="a test",
        )
        objective = Objective(Model(config))
        named = parameters(objective)
        built = optimizer.build(named, undecayed(objective), OptimizerConfig(weight_decay=0.5))
        decay = {
            id(p): group["weight_decay"] for group in built.param_groups for p in group["params"]
        }
        spared = {name for name, p in named.items() if decay[id(p)] == 0}
        assert spared >= {name for name, p in named.items() if p.ndim < 2}, kind
        several = {name.rpartition(".")[2] for name in spared if named[name].ndim > 1}
        assert several == SPARED.get(kind, set()), kind
