from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.checkpoints.fragments import Box, Fragment, cover, fill

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
    found: list[int] = []
    for box in cover(shape, start, end, cap):
        part = numbered
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            part = part.narrow(dim, offset, size)
        assert 1 <= box.numel <= cap
        found += part.flatten().tolist()
    assert found == list(range(start, end))


@given(ranges())
def test_without_a_cap_few_boxes_do(case: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, end = case
    assert len(list(cover(shape, start, end, 10**9))) <= max(1, 2 * len(shape) - 1)


def test_a_part_of_a_tensor_shifts_its_boxes() -> None:
    whole = torch.arange(40.0).view(8, 5)
    data = torch.zeros(6)
    # A tensor-parallel rank's part is rows 4…7; its range begins in the middle of one.
    fragment = Fragment("master.w", (8, 5), start=3, data=data, part=Box((4, 0), (4, 5)))
    fill([fragment], {"master.w": whole})
    assert data.tolist() == [23, 24, 25, 26, 27, 28]
    assert [box for box, _ in fragment.boxes()] == [Box((4, 3), (1, 2)), Box((5, 0), (1, 4))]


def test_views_are_live() -> None:
    data = torch.zeros(10)
    for _, view in Fragment("m", (5, 4), 3, data).boxes():
        view.add_(1)
    assert data.tolist() == [1.0] * 10
