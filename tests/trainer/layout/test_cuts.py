"""Cuts: the least greatest chunk is exact, and the simulator is never slower than even cuts."""

from __future__ import annotations

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.trainer.layout.cuts import (
    ROUNDS,
    even_cuts,
    fastest_cuts,
    minimax_cuts,
    pass_costs,
    simulated_time,
)
from headrace.trainer.layout.schedules import SCHEDULES

costs = st.lists(st.integers(1, 20).map(float), min_size=4, max_size=10)
heads = st.integers(0, 40).map(float)


def greatest(cuts: tuple[int, ...], layers: list[float], head: float) -> float:
    return max(pass_costs(cuts, layers, head)["forward"])


@given(costs, heads, st.integers(1, 4))
def test_the_greatest_chunk_is_as_small_as_any(layers, head, chunks) -> None:
    result = minimax_cuts(layers, chunks, head)
    every = combinations(range(1, len(layers)), chunks - 1)
    assert greatest(result, layers, head) == min(greatest(cuts, layers, head) for cuts in every)


@settings(deadline=None)
@given(costs, heads, st.sampled_from([("1f1b", 4, 1), ("gpipe", 3, 1), ("interleaved", 2, 2)]))
def test_chosen_cuts_are_never_slower_than_even_cuts(layers, head, case) -> None:
    schedule, stages, chunks = case
    orders = SCHEDULES[schedule].orders(stages, chunks, ROUNDS * stages)
    result = fastest_cuts(schedule, stages, chunks, layers, head)
    assert sorted(set(result)) == list(result) and result[0] > 0 and result[-1] < len(layers)
    equal = even_cuts(len(layers), stages * chunks)
    assert simulated_time(orders, result, layers, head) <= simulated_time(
        orders, equal, layers, head
    )


def test_a_large_head_leaves_its_stage_few_layers() -> None:
    assert fastest_cuts("1f1b", 2, 1, [1.0] * 8, 4.0) == (6,)
    assert fastest_cuts("1f1b", 1, 1, [1.0] * 8, 4.0) == ()


@pytest.mark.parametrize(("layers", "chunks"), [(8, 4), (7, 3), (4, 4)])
def test_even_cuts_leave_no_chunk_empty(layers: int, chunks: int) -> None:
    ends = (0, *even_cuts(layers, chunks), layers)
    sizes = [b - a for a, b in pairwise(ends)]
    assert min(sizes) >= 1 and max(sizes) - min(sizes) <= 1
