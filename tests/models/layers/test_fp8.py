"""Products in FP8: the rounding against every e4m3 number, and the op against a dense oracle."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from headrace.models.layers import fp8
from headrace.models.layers.fp8 import E4M3, Quantized, fp8_linear, multiply, quantize

NUMBERS = torch.arange(256, dtype=torch.uint8).view(E4M3).double()
FINITE = NUMBERS[NUMBERS.isfinite()].sort().values


def rounded(x: Tensor) -> Tensor:
    """Return Q(x) of fp64 rows by comparing each value with every e4m3 number."""
    tops = x.abs().amax(-1, keepdim=True)
    scales = torch.exp2(torch.ceil(torch.log2(tops / 464)))
    distances = (x.unsqueeze(-1) / scales.unsqueeze(-1) - FINITE).abs()
    return FINITE[distances.argmin(-1)] * scales


def rows(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(torch.randint(-30, 30, (*shape[:-1], 1), generator=generator))
    return torch.randn(shape, generator=generator, dtype=torch.float64) * sizes


def test_values_are_the_nearest_e4m3_numbers() -> None:
    x = rows(40, 33)
    assert torch.equal(quantize(x).dequantized(torch.float64), rounded(x.float().double()))
    assert not torch.equal(quantize(x * 1.1).dequantized(torch.float64), rounded(x))


@given(st.floats(2.0**-100, 2.0**100, width=32))
def test_scales_are_the_smallest_powers_of_two(top: float) -> None:
    scale = float(fp8.row_scales(torch.tensor([top])))
    assert math.frexp(scale)[0] == 0.5
    assert top / scale <= 464 < top / scale * 2


def test_zeros_and_what_is_not_finite() -> None:
    x = torch.zeros(3, 4)
    x[1, 0], x[2, 0] = math.inf, math.nan
    result = quantize(x).dequantized(torch.float32)
    assert torch.equal(result[0], x[0])
    assert not result[1:, 0].isfinite().any(), "the step will be skipped"


def test_rounding_twice_changes_nothing() -> None:
    """A gather in FP8 relies on it."""
    once = quantize(rows(4096, 3))
    twice = quantize(once.dequantized(torch.bfloat16))
    assert torch.equal(twice.scales, once.scales)
    assert torch.equal(twice.values.float(), once.values.float())


@pytest.mark.parametrize("narrow", [48, 32])
@pytest.mark.parametrize("bias", [False, True])
def test_the_op_equals_products_of_rounded_matrices(narrow: int, bias: bool) -> None:
    x, w, g = rows(5, 7, 64), rows(48, 64, seed=1), rows(5, 7, 48, seed=2)
    b = rows(1, 48, seed=3)[0] if bias else None
    leaves = [leaf.requires_grad_() for leaf in (x, w, b) if leaf is not None]
    y = fp8_linear(x, None, None, w, b, narrow, "", "")
    result = [y, *torch.autograd.grad(y, leaves, g)]
    x, w, wide = x.detach().float().double(), w.detach().float().double(), w.detach()[narrow:]
    w = rounded(w[:narrow])
    scales = quantize(leaves[1].detach()[:narrow]).scales.flatten().double()
    into_x = rounded((g[..., :narrow] * scales).flatten(0, 1)) @ (w / scales.unsqueeze(1))
    expected = [
        torch.cat([rounded(x) @ w.T, leaves[0].detach() @ wide.T], -1)
        + (0 if b is None else b.detach()),
        into_x.view(x.shape) + g[..., narrow:] @ wide,
        torch.einsum("abn,abk->nk", g, leaves[0].detach()),
        *([g.sum((0, 1))] if bias else []),
    ]
    for number, (have, right) in enumerate(zip(result, expected, strict=True)):
        atol = 1e-12 * float(right.abs().max())
        assert torch.allclose(have, right, rtol=1e-12, atol=atol), number
    dense = (leaves[0] @ leaves[1].T).detach() + (0 if b is None else leaves[2].detach())
    error = float((y.detach() - dense).norm() / dense.norm())
    assert 1e-3 < error < 0.1 or narrow < len(leaves[1]), "the rounding is visible"


def test_the_op_keeps_the_contract_of_custom_ops() -> None:
    x, w = torch.randn(6, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    torch.library.opcheck(fp8_linear, (x, None, None, w, None, 16, "", ""))


def test_stored_rows_are_used() -> None:
    x, w = torch.randn(6, 32), torch.randn(16, 32)
    doubled = quantize(2 * x)
    y = fp8_linear(x, *doubled, w, None, 16, "", "")
    assert torch.equal(y, fp8_linear(2 * x, None, None, w, None, 16, "", ""))


def test_torch_multiplies_the_same() -> None:
    """torch's scaled product, here on CPU, takes the operands as the op gives them."""
    a, b = quantize(torch.randn(7, 64).bfloat16()), quantize(torch.randn(48, 64).bfloat16())
    bias = torch.randn(48).bfloat16()
    result = fp8.multiply_on_matrix_units(a, b, bias, torch.bfloat16, fast=False).float()
    expected = multiply(a, b, bias, torch.bfloat16, fast=False).float()
    assert torch.allclose(result, expected, rtol=2**-7, atol=2**-6)
    doubled = multiply(Quantized(a.values, 2 * a.scales), b, bias, torch.bfloat16, fast=False)
    assert not torch.allclose(result, doubled.float(), rtol=2**-7, atol=2**-6)


def test_wrong_scales_are_visible() -> None:
    x, w = torch.randn(6, 64), torch.randn(16, 64)
    right = fp8_linear(x, None, None, w, None, 16, "", "")
    with mock.patch.object(fp8, "row_scales", lambda tops: torch.full_like(tops, 2.0**8)):
        wrong = fp8_linear(x, None, None, w, None, 16, "", "")
    dense = x @ w.T
    assert (right - dense).norm() < 0.1 * dense.norm() < (wrong - dense).norm()
