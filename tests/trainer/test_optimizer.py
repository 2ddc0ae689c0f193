from __future__ import annotations

import pytest
import torch
from torch import nn

from headrace.trainer import optimizer
from headrace.trainer.optimizer import OptimizerConfig


def test_matrices_decay_and_vectors_do_not() -> None:
    layer = nn.Linear(3, 2)
    built = optimizer.build(dict(layer.named_parameters()), OptimizerConfig(lr=0.1))
    for parameter in layer.parameters():
        nn.init.ones_(parameter)
        parameter.grad = torch.zeros_like(parameter)
    built.step()
    assert torch.allclose(layer.weight, torch.full((2, 3), 1 - 0.1 * 0.1))
    assert torch.equal(layer.bias, torch.ones(2))


def test_moments_exist_before_the_first_update_and_are_live() -> None:
    parameter = nn.Parameter(torch.ones(4, 2))
    built = optimizer.build({"w": parameter}, OptimizerConfig())
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
        built = optimizer.build({"w": parameter}, config)
        optimizer.moments(built, parameter)
        optimizer.set_updates(built, updates)
        parameter.grad = torch.ones(1, 1)
        built.step()
        moved.append(float(-parameter.detach()))
    assert moved[0] == pytest.approx(1.0) and moved[1] == pytest.approx(0.1 / 0.05**0.5, rel=0.01)


def test_wrong_values_are_all_named() -> None:
    with pytest.raises(ValueError, match=r"lr must be above 0, not -1; beta2 must be in \[0, 1\)"):
        OptimizerConfig(lr=-1, beta2=1)
