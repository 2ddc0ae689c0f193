from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.models.parallel.axes import Axis
from headrace.models.parallel.local_shard import LocalShard, Sharded
from headrace.models.parallel.sharding import slice_local_shard
from headrace.trainer.checkpoints.fragments import Box, Fragment, cover

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = draw(SHAPES)
    numel = math.prod(shape)
    start = draw(st.integers(0, numel))
    return shape, start, draw(st.integers(start, numel))


@given(ranges(), st.integers(1, 40))
def test_boxes_cover_a_range_exactly_and_in_order(
    case: tuple[tuple[int, ...], int, int], cap: int
) -> None:
    shape, start, end = case
    numbered = torch.arange(math.prod(shape)).view(shape)
    result: list[int] = []
    for box in cover(shape, start, end, cap):
        part = numbered
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        assert 1 <= box.numel <= cap
        result += part.flatten().tolist()
    assert result == list(range(start, end))


@given(ranges())
def test_without_a_cap_few_boxes_suffice(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, end = case
    assert len(list(cover(shape, start, end, 10**9))) <= max(1, 2 * len(shape) - 1)


def test_boxes_of_a_local_shard_are_shifted() -> None:
    whole = torch.arange(40.0).view(8, 5)
    data = torch.zeros(6)
    # The local shard of a TP rank is rows 4…7; its range begins in the middle of a row.
    part = LocalShard((8, 5), runs=(range(4, 8),))
    fragment = Fragment("master.w", part, start=3, data=data)
    fragment.take(whole)
    assert data.tolist() == [23, 24, 25, 26, 27, 28]
    assert [box for box, _ in fragment.boxes()] == [Box((4, 3), (1, 2)), Box((5, 0), (1, 4))]


@given(st.data(), SHAPES.filter(bool), st.integers(1, 4), st.integers(1, 40))
def test_boxes_of_all_ranks_cover_the_tensor_exactly_once(
    data: st.DataObject, shape: tuple[int, ...], ranks: int, cap: int
) -> None:
    """For any dimension, any parts along it, and any range of a rank."""
    dim = data.draw(st.integers(0, len(shape) - 1))
    cuts = data.draw(st.lists(st.integers(0, shape[dim]), max_size=2).map(sorted))
    sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, shape[dim]], strict=True))
    whole = torch.arange(1.0, math.prod(shape) + 1).view(shape)
    result = torch.zeros(shape)
    for rank in range(ranks):
        part = LocalShard(shape, dim, Sharded(dim, sizes).runs(shape[dim], Axis(None, rank, ranks)))
        local = slice_local_shard(part, whole)
        assert tuple(local.shape) == part.local
        middle = data.draw(st.integers(0, local.numel()))
        for start, piece in ((0, local.flatten()[:middle]), (middle, local.flatten()[middle:])):
            for box, view in Fragment("m", part, start, piece).boxes(cap):
                assert tuple(view.shape) == box.sizes and view.numel() <= cap
                place = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
                result[place] += view
    assert torch.equal(result, whole)


def test_views_are_live() -> None:
    data = torch.zeros(10)
    for _, view in Fragment("m", LocalShard((5, 4)), 3, data).boxes():
        view.add_(1)
    assert data.tolist() == [1.0] * 10
