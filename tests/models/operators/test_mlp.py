from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.kernels.operator_checks import is_its_definition, is_seen, make, rounds_to
from torch import Tensor

from headrace.models.operators.mlp import apply_gate

ACTIVATIONS = {
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu-tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "quick-gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x**2 * (x > 0),
    "identity": lambda x: x,
}


def plain(mlp: Any, u: Tensor) -> Tensor:
    out: Tensor = mlp.down(ACTIVATIONS[mlp.options.activation](mlp.up(u, joined=True)))
    return out


def gated(glu: Any, u: Tensor) -> Tensor:
    gate, up = glu.gate_up(u)
    out: Tensor = glu.down(ACTIVATIONS[glu.options.activation](gate) * up)
    return out


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_are_their_definitions(activation: str, bias: bool) -> None:
    options = {"hidden": 6, "activation": activation, "bias": bias}
    is_its_definition(make("mlp", **options), plain)
    is_its_definition(make("glu", **options), gated)


def test_changes_are_seen() -> None:
    def swap_the_gate(changed: Any) -> None:
        changed.gate_up.weight[:] = changed.gate_up.weight.roll(6, dims=0)

    def take_another_activation(changed: Any) -> None:
        changed.options = make("glu", hidden=6, activation="gelu").options

    for change in (swap_the_gate, take_another_activation):
        is_seen(make("glu", hidden=6), gated, change)


@pytest.mark.parametrize("kind", ["mlp", "glu"])
def test_in_bf16(kind: str) -> None:
    rounds_to(make(kind, hidden=6), 0.02)


def test_a_clamped_gate_has_no_gradient_at_its_bound() -> None:
    """In every version of torch, and in the kernel: half precision has many numbers there."""
    x = torch.tensor([[1.0, -1.0, 0.5, 1.0, -1.0, 0.5]], dtype=torch.float64, requires_grad=True)
    y = apply_gate(x, "identity", "torch", limit=1.0, offset=1.0)
    assert y.tolist() == [[2.0, 0.0, 0.75]]
    [gradient] = torch.autograd.grad(y.sum(), x)
    assert gradient.tolist() == [[0.0, 0.0, 1.5, 0.0, 0.0, 0.5]]
