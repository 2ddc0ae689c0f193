from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from headrace.models.layers.grouped import grouped_product

COUNTS = torch.tensor([3, 0, 4, 1])


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, weights = (
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in ((8, 5), (4, 6, 5))
    )
    return x.requires_grad_(), weights.requires_grad_()


def one_by_one(x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
    group = torch.arange(len(counts)).repeat_interleave(counts)
    return torch.stack([weights[g] @ row for row, g in zip(x, group.tolist(), strict=True)])


def test_each_row_is_multiplied_by_the_matrix_of_its_group() -> None:
    x, weights = inputs()
    y, expected = grouped_product(x, weights, COUNTS), one_by_one(x, weights, COUNTS)
    assert torch.allclose(y, expected, rtol=1e-14)
    other = grouped_product(x, weights, torch.tensor([3, 1, 3, 1]))
    assert not torch.allclose(other, expected), "a negative control"


def test_gradients_by_finite_differences() -> None:
    x, weights = inputs()
    assert torch.autograd.gradcheck(lambda x, w: grouped_product(x, w, COUNTS), (x, weights))
    grouped_product(x, weights, COUNTS).sum().backward()
    assert weights.grad is not None and not weights.grad[1].any(), "a group without rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype) -> None:
    x, weights = inputs(dtype)
    y = grouped_product(x, weights, COUNTS)
    exact = one_by_one(x.double(), weights.double(), COUNTS)
    assert y.dtype == dtype
    assert (y.double() - exact).abs().max() < 4 * torch.finfo(dtype).eps * exact.abs().max()


def test_a_compiler_sees_one_operation_whatever_the_counts() -> None:
    calls = 0

    def backend(module: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        nonlocal calls
        calls += 1
        return module

    compiled = torch.compile(
        lambda x, w, counts: grouped_product(x.relu(), w, counts),
        backend=backend,  # type: ignore[arg-type]
        fullgraph=True,
    )
    x, weights = inputs()
    for counts in (COUNTS, torch.tensor([0, 8, 0, 0])):
        expected = grouped_product(x.relu(), weights, counts)
        assert torch.equal(compiled(x, weights, counts), expected)
    assert calls == 1


def test_torchs_counter_counts_the_products() -> None:
    x, weights = inputs()
    with FlopCounterMode(display=False) as whole:
        grouped_product(x, weights, COUNTS).sum().backward()
    x, weights = inputs()
    with FlopCounterMode(display=False) as parts:
        rows = x.split(COUNTS.tolist())
        y = torch.cat([a @ w.T for a, w in zip(rows, weights, strict=True)])
        y.sum().backward()
    assert whole.get_total_flops() == parts.get_total_flops() == 3 * 2 * 8 * 5 * 6
