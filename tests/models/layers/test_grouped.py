from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from headrace.models.layers import grouped
from headrace.models.layers.grouped import group_ends, grouped_product

COUNTS = torch.tensor([3, 0, 4, 1])
ENDS = torch.tensor([3, 3, 7, 8], dtype=torch.int32)


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
    y, expected = grouped_product(x, weights, ENDS), one_by_one(x, weights, COUNTS)
    assert torch.allclose(y, expected, rtol=1e-14)
    regrouped = grouped_product(x, weights, torch.tensor([3, 4, 7, 8]))
    assert not torch.allclose(regrouped, expected), "a negative control"


def test_gradients_by_finite_differences() -> None:
    x, weights = inputs()
    assert torch.autograd.gradcheck(lambda x, w: grouped_product(x, w, ENDS), (x, weights))
    grouped_product(x, weights, ENDS).sum().backward()
    assert weights.grad is not None and not weights.grad[1].any(), "a group without rows"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype) -> None:
    x, weights = inputs(dtype)
    y = grouped_product(x, weights, ENDS)
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
        lambda x, w, counts: grouped_product(x.relu(), w, group_ends(counts, x, w)),
        backend=backend,  # type: ignore[arg-type]
        fullgraph=True,
    )
    x, weights = inputs()
    for counts in (COUNTS, torch.tensor([0, 8, 0, 0])):
        expected = grouped_product(x.relu(), weights, group_ends(counts, x, weights))
        assert torch.equal(compiled(x, weights, counts), expected)
    assert calls == 1


def test_torchs_counter_counts_the_products() -> None:
    x, weights = inputs()
    with FlopCounterMode(display=False) as whole:
        grouped_product(x, weights, ENDS).sum().backward()
    x, weights = inputs()
    with FlopCounterMode(display=False) as parts:
        rows = x.split(COUNTS.tolist())
        y = torch.cat([a @ w.T for a, w in zip(rows, weights, strict=True)])
        y.sum().backward()
    assert whole.get_total_flops() == parts.get_total_flops() == 3 * 2 * 8 * 5 * 6


@pytest.mark.parametrize("ends", [ENDS, torch.tensor([0, 8, 8, 8], dtype=torch.int32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_launch_computes_what_the_loop_does(dtype: torch.dtype, ends: Tensor) -> None:
    """torch's grouped_mm on the CPU, with the strides that a GPU needs."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(8, n, generator=generator).to(dtype) for n in (16, 24))
    weights = torch.randn(4, 24, 16, generator=generator).to(dtype)
    near = {"rtol": 0, "atol": 8 * torch.finfo(dtype).eps}
    for inputs, matrices in ((x, weights), (y, weights.transpose(1, 2))):
        result = grouped.product_in_one_launch(inputs, matrices, ends)
        torch.testing.assert_close(result, grouped.product_by_group(inputs, matrices, ends), **near)
    outer = grouped.outer_in_one_launch(y, x, ends)
    torch.testing.assert_close(outer, grouped.outer_by_group(y, x, ends), **near)
    moved = grouped.product_by_group(x, weights, torch.tensor([4, 4, 7, 8]))
    assert not torch.allclose(grouped.product_in_one_launch(x, weights, ENDS), moved, atol=0.1)


def test_gradients_of_groups_without_rows_are_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Blackwell torch's grouped_mm does not write them."""
    exact = torch.nn.functional.grouped_mm

    def careless(*args: Tensor, offs: Tensor) -> Tensor:
        products = exact(*args, offs=offs)
        if products.dim() == 3:
            products[1] = torch.nan
        return products

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", careless)
    monkeypatch.setattr(grouped, "leaves_garbage", lambda _: True)
    x, y = torch.ones(8, 16), torch.ones(8, 24)
    expected = grouped.outer_by_group(y, x, ENDS)
    assert torch.equal(grouped.outer_in_one_launch(y, x, ENDS), expected)
    nothing = torch.zeros(4, dtype=torch.int32)
    assert not grouped.outer_in_one_launch(y[:0], x[:0], nothing).any()
    assert grouped.product_in_one_launch(x[:0], torch.ones(4, 24, 16), nothing).shape == (0, 24)


@pytest.mark.parametrize(("capability", "garbage"), [((9, 0), False), ((10, 0), True)])
def test_garbage_of_empty_groups_is_known(
    capability: tuple[int, int], garbage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert grouped.leaves_garbage(torch.device("cuda", 0)) == garbage
    assert not grouped.leaves_garbage(torch.device("cpu"))


@pytest.mark.parametrize(
    ("dtype", "sizes", "capability", "problem"),
    [
        (torch.bfloat16, (24, 16), (9, 0), None),
        (torch.bfloat16, (24, 16), (10, 3), None),
        (torch.float32, (24, 16), (9, 0), "multiplies bf16, not torch.float32"),
        (torch.bfloat16, (24, 12), (9, 0), "8 does not divide 12, a width of the experts"),
        (torch.bfloat16, (24, 16), (8, 6), "this GPU has compute capability 8.6"),
    ],
)
def test_where_a_product_is_one_launch(
    dtype: torch.dtype,
    sizes: tuple[int, int],
    capability: tuple[int, int],
    problem: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    with FakeTensorMode():
        x = torch.empty(8, sizes[1], dtype=dtype, device="cuda")
        weights = torch.empty(4, *sizes, dtype=dtype, device="cuda")
        counts = torch.empty(4, dtype=torch.int64, device="cuda")
        warns = pytest.warns(RuntimeWarning, match=problem) if problem else nullcontext()
        with warns:
            ends = group_ends(counts, x, weights)
    assert (ends.device.type, ends.dtype) == ("cpu" if problem else "cuda", torch.int32)
