"""The simulator beside the textbook's formula and longest paths of a graph."""

from __future__ import annotations

import random
from itertools import pairwise

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.trainer.layout.schedules import SCHEDULES, Kind, Orders, StageAction
from headrace.trainer.layout.simulate import simulate


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 5), (2, 2), (4, 4), (4, 32), (8, 11)])
def test_even_stages_take_the_textbooks_time(
    schedule: str, stages: int, micro_batches: int
) -> None:
    forward, backward = 1.25, 2.5
    orders = SCHEDULES[schedule].orders(stages, 1, micro_batches)
    costs: dict[Kind, list[float]] = {
        "forward": [forward] * stages,
        "backward": [backward] * stages,
    }
    assert simulate(orders, costs).time == (micro_batches + stages - 1) * (forward + backward)


@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(SCHEDULES)), st.integers(1, 5), st.integers(1, 9), st.integers(0, 99))
def test_a_step_is_the_longest_path_of_its_passes(
    schedule: str, stages: int, micro_batches: int, seed: int
) -> None:
    draw = random.Random(seed)
    chunks = 2 if schedule == "interleaved" and stages > 1 else 1
    orders = SCHEDULES[schedule if chunks > 1 else "1f1b"].orders(stages, chunks, micro_batches)
    kinds: tuple[Kind, ...] = ("forward", "backward")
    costs = {kind: [draw.random() for _ in range(stages * chunks)] for kind in kinds}
    message = draw.choice([0.0, draw.random()])
    hops = [message] * (stages * chunks - 1)
    result = simulate(orders, costs, message).time
    assert result == pytest.approx(longest_path(orders, costs, hops))
    hops = [draw.random() for _ in hops]
    result = simulate(orders, costs, hops).time
    assert result == pytest.approx(longest_path(orders, costs, hops))


def longest_path(orders: Orders, costs: dict[Kind, list[float]], hops: list[float]) -> float:
    """Return the length of the longest path of passes: in the order of a stage, and through the
    chunks and back."""
    graph = networkx.DiGraph()
    last = len(costs["forward"]) - 1
    for order in orders:
        for before, after in pairwise(order):
            graph.add_edge(before, after, weight=costs[before.kind][before.chunk])
        for action in order:
            cost = costs[action.kind][action.chunk]
            graph.add_edge(action, "end", weight=cost)
            kind, chunk, micro = action.kind, action.chunk, action.micro
            if kind == "forward" and chunk < last:
                after = StageAction("forward", chunk + 1, micro)
                graph.add_edge(action, after, weight=cost + hops[chunk])
            if kind == "forward" and chunk == last:
                graph.add_edge(action, StageAction("backward", chunk, micro), weight=cost)
            if kind == "backward" and chunk > 0:
                after = StageAction("backward", chunk - 1, micro)
                graph.add_edge(action, after, weight=cost + hops[chunk - 1])
    length: float = networkx.dag_longest_path_length(graph)
    return length
