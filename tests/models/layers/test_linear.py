"""Products whose gradients are joined inside other products, beside plain autograd, in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.models.layers.linear import product_with_input, split_product

SIZES = (8, 5, 3)


def gradients(run: Callable[..., tuple[Tensor, ...]], *leaves: Tensor) -> list[Tensor]:
    """Return the outputs, and the gradients of a sum in which each output has its own weights."""
    outputs = run(*leaves)
    numbers = torch.Generator().manual_seed(2)
    probes = [torch.randn(y.shape, generator=numbers, dtype=y.dtype) for y in outputs]
    return [*outputs, *torch.autograd.grad(outputs, leaves, probes)]


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(1)
    return [
        torch.randn(shape, generator=numbers, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


@pytest.mark.parametrize("bias", [False, True])
def test_the_parts_of_a_product_have_the_gradients_of_the_whole(bias: bool) -> None:
    inputs = leaves((2, 7, 6), (sum(SIZES), 6), *([(sum(SIZES),)] if bias else []))

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        return split_product(x, weight, bias, SIZES)

    def whole(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, ...]:
        return F.linear(x, weight, bias).split(SIZES, dim=-1)

    torch.testing.assert_close(gradients(ours, *inputs), gradients(whole, *inputs))


def test_an_unused_part_has_a_gradient_of_zeros() -> None:
    x, weight = leaves((2, 7, 6), (sum(SIZES), 6))
    parts = split_product(x, weight, None, SIZES)
    [of_weight] = torch.autograd.grad(parts[0].sum() + parts[2].sum(), [weight])
    assert [bool(item.count_nonzero()) for item in of_weight.split(SIZES)] == [True, False, True]


def test_what_reads_x_beside_its_product_adds_to_its_gradient() -> None:
    inputs = leaves((2, 7, 6), (5, 6))
    torch.testing.assert_close(
        gradients(product_with_input, *inputs), gradients(lambda x, w: (x, F.linear(x, w)), *inputs)
    )
