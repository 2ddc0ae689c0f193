"""Schedules: every pass once, in an order that cannot deadlock; bubbles as in closed form."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.planner.memory import max_in_flight

from headrace.trainer.layout.schedules import (
    SCHEDULES,
    Orders,
    Schedule,
    StageAction,
    forward_only,
)
from headrace.trainer.layout.simulate import Deadlock, simulate

CASES = [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3)]
schedules = st.sampled_from(CASES)
stages = st.integers(1, 8)
micro_batches = st.integers(1, 33)


def letters(order: list[StageAction]) -> str:
    return " ".join(f"{action.kind[0]}{action.micro}" for action in order)


def test_the_orders_that_the_page_shows() -> None:
    first, last = SCHEDULES["1f1b"].orders(2, 1, 3)
    assert letters([*first]) == "f0 f1 b0 f2 b1 b2" and letters([*last]) == "f0 b0 f1 b1 f2 b2"
    assert letters([*SCHEDULES["gpipe"].orders(2, 1, 2)[1]]) == "f0 f1 b0 b1"
    [alone] = SCHEDULES["1f1b"].orders(1, 1, 2)
    assert letters([*alone]) == "f0 b0 f1 b1"


@given(schedules, stages, micro_batches, st.randoms(use_true_random=False))
def test_every_pass_runs_once_and_no_stage_waits_for_ever(case, pp, m, random) -> None:
    """At any cost of the passes."""
    name, chunks = case
    orders = SCHEDULES[name].orders(pp, chunks, m)
    total = pp * chunks
    passes = Counter(action for order in orders for action in order)
    assert set(passes.values()) == {1} and len(passes) == 2 * total * m
    for stage, order in enumerate(orders):
        assert {action.chunk % pp for action in order} == {stage}
        for chunk in range(stage, total, pp):  # gradients are added in the order of one stage
            backward = [a.micro for a in order if a.chunk == chunk and a.kind == "backward"]
            assert backward == list(range(m))
    costs = {kind: [random.random() for _ in range(total)] for kind in ("forward", "backward")}
    timeline = simulate(orders, costs)
    assert [[span.action for span in spans] for spans in timeline.spans] == [*map(list, orders)]
    simulate(forward_only(orders), costs)


@given(st.sampled_from(["1f1b", "gpipe"]), stages, micro_batches)
def test_bubbles_are_those_of_the_closed_form(name, pp, m) -> None:
    costs = {"forward": [1.0] * pp, "backward": [2.0] * pp}
    orders = SCHEDULES[name].orders(pp, 1, m)
    for bubble in simulate(orders, costs).bubbles:
        assert bubble == pytest.approx((pp - 1) / (m + pp - 1))
    alive = [max_in_flight(order) for order in orders]
    assert alive == [min(m, pp - stage) if name == "1f1b" else m for stage in range(pp)]


@given(st.integers(2, 8), st.integers(1, 4), st.integers(2, 3))
def test_interleaving_divides_the_bubble_by_the_chunks(pp, rounds, chunks) -> None:
    m = pp * rounds
    costs = {"forward": [1.0] * pp * chunks, "backward": [2.0] * pp * chunks}
    orders = SCHEDULES["interleaved"].orders(pp, chunks, m)
    for bubble in simulate(orders, costs).bubbles:
        assert bubble == pytest.approx((pp - 1) / (chunks * m + pp - 1))


class Listed(Schedule):
    """What a schedule says of itself by its lists alone, of all micro-batches."""

    name = "listed"

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule

    def orders(self, stages: int, chunks: int, micro_batches: int) -> Orders:
        return self.schedule.orders(stages, chunks, micro_batches)


def differences(schedule: Schedule, stages: int, chunks: int, micro_batches: int) -> list[str]:
    """Return the answers of a schedule that its lists contradict."""
    sizes, listed = (stages, chunks, micro_batches), Listed(schedule)
    answers = {
        "fullest": [item.fullest_moment(stages - 1, *sizes) for item in (schedule, listed)],
        "fullest of the first": [item.fullest_moment(0, *sizes) for item in (schedule, listed)],
    }
    wrong = [name for name, (said, true) in answers.items() if said != true]
    sample = stages, chunks, schedule.sample_size(stages, micro_batches)
    if listed.fullest_moment(0, *sample) != listed.fullest_moment(0, *sizes):
        wrong.append("sample_size")
    if min(micro_batches, schedule.warm_up(*sizes)) < listed.warm_up(*sizes):
        wrong.append("warm_up")
    return wrong


@given(schedules, stages, micro_batches)
def test_closed_forms_are_those_of_the_lists(case, pp, m) -> None:
    """On one stage too: there GPipe has all micro-batches in flight as well."""
    name, chunks = case
    assert differences(SCHEDULES[name], pp, chunks, m) == []


@given(st.sampled_from(["1f1b", "gpipe"]), stages, micro_batches)
def test_no_step_ends_before_the_bound_of_a_stage(name, pp, m) -> None:
    """On equal stages the bound is the time of the step, for the first stage."""
    schedule, costs = SCHEDULES[name], {"forward": [1.0] * pp, "backward": [2.0] * pp}
    [bound] = schedule.bound(m, pp, *(np.array([item]) for item in (3.0, 2.0, 3.0 * pp)))
    [plain] = Listed(schedule).bound(m, pp, *(np.array([item]) for item in (3.0, 2.0, 3.0 * pp)))
    assert plain <= bound <= simulate(schedule.orders(pp, 1, m), costs).time


def test_a_wrong_closed_form_is_found() -> None:
    """Negative control: GPipe with the answers of 1F1B."""

    class Wrong(type(SCHEDULES["1f1b"])):  # type: ignore[misc]
        def orders(self, stages: int, chunks: int, micro_batches: int) -> Orders:
            return SCHEDULES["gpipe"].orders(stages, chunks, micro_batches)

    result = ["fullest", "fullest of the first", "sample_size", "warm_up"]
    assert differences(Wrong(), 2, 1, 8) == result
    assert differences(Wrong(), 1, 1, 8) == result


def test_a_deadlock_is_found() -> None:
    """Negative control: the second stage wants a gradient that the first stage sends later."""
    orders = [list(order) for order in SCHEDULES["1f1b"].orders(2, 1, 2)]
    orders[1] = [*orders[1][2:], *orders[1][:2]]
    simulate(orders, {"forward": [1.0] * 2, "backward": [1.0] * 2})
    orders[0] = [orders[0][0], orders[0][2], orders[0][1], orders[0][3]]
    with pytest.raises(Deadlock, match="wait for each other"):
        simulate(orders, {"forward": [1.0] * 2, "backward": [1.0] * 2})


def test_memory_is_weighed_by_chunk() -> None:
    [first, _] = SCHEDULES["interleaved"].orders(2, 2, 4)
    assert max_in_flight(first) == 5  # chunks of half a stage
    assert max_in_flight(first, [1.0, math.nan, 0.0, math.nan]) == 4
