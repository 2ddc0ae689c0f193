"""Ranks that hold the others up in many steps."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.ranks.ranks import Ranks

from headrace.trainer.record.config import WatchConfig
from headrace.trainer.record.logger import step_scalars
from headrace.trainer.record.stragglers import BEGINS, ENDS, Slowest, Stragglers


def watch(steps: list[tuple[float, ...]], stages: int = 1, bound: float = 0.1) -> list[Any]:
    """Return the changes that these own times make in steps of one second: [step, kind, rank]."""
    stragglers, result = Stragglers(bound, 3, stages), []
    for number, rank_seconds in enumerate(steps):
        stragglers.add_step(rank_seconds, 1.0, 8)
        result += [(number, kind, rank) for kind, rank, _ in stragglers.changes(number)]
    return result


def test_a_rank_that_stays_slow_is_named_once_and_once_when_it_is_mended() -> None:
    even, slow = (0.5, 0.5, 0.5), (0.5, 0.5, 0.7)
    assert watch([slow] * 5 + [even] * 2 + [slow] + [even] * 5) == [(2, BEGINS, 2), (10, ENDS, 2)]
    assert watch([slow, slow, even] * 5) == [], "never three steps in a row"
    assert watch([slow] * 9, bound=0.21) == []


def test_two_ranks_have_the_faster_one_as_their_median() -> None:
    assert watch([(0.9, 0.5)] * 3) == [(2, BEGINS, 0)]


def test_ranks_are_compared_within_their_stage() -> None:
    """The second stage has more work on each of its ranks; one of them is slow."""
    assert watch([(0.2, 0.2, 0.8, 0.8)] * 5, stages=2) == []
    assert watch([(0.2, 0.2, 0.8, 0.8)] * 5) != [], "control: without stages they stand out"
    assert watch([(0.2, 0.2, 0.8, 0.95)] * 3, stages=2) == [(2, BEGINS, 3)]
    assert Stragglers(0.1, 3, stages=2).add_step((0.2, 0.8), 1.0, 8) is None, "no rank has a peer"


def test_a_stage_is_compared_by_its_operations() -> None:
    """The second stage has three times the operations of the first, in rows of 8 tokens, and is
    slow; in rows of 16 it has four times, which explain its time."""
    work = {8: (1.0, 3.0), 16: (1.0, 4.0)}
    result, even = (Stragglers(0.1, 3, 2, work.__getitem__) for _ in range(2))
    for step in range(5):
        slowest = result.add_step((0.2, 0.8), 1.0, 8)
        assert slowest == (1, pytest.approx(0.2), step + 1)
        changes = [*result.changes(step)]
        assert [(kind, rank) for kind, rank, _ in changes] == [(BEGINS, 1)] * (step == 2)
        for _, _, message in changes:
            said = "stage 1 (rank 1) is slow: since step 0 the other stages wait for it in 20% of"
            assert message.startswith(said)
        even.add_step((0.2, 0.8), 1.0, 16)
        assert not [*even.changes(step)]
    for step in range(5, 8):
        result.add_step((0.2, 0.6), 1.0, 8)
        ended = [message for _, _, message in result.changes(step)]
        assert ended == ["stage 1 (rank 1) is no longer slow, since step 5"] * (step == 7)


def test_a_stage_of_several_ranks_is_named_with_all_of_them() -> None:
    stragglers = Stragglers(0.1, 1, 3, lambda length: (1.0, 1.0, 1.0))
    slowest = stragglers.add_step((0.2, 0.2, 0.2, 0.2, 0.5, 0.55), 1.0, 8)
    assert slowest is not None and slowest.rank == 5
    [(_, rank, message)] = stragglers.changes(0)
    assert rank == 4 and message.startswith("stage 2 (ranks 4 to 5) is slow")


@given(st.lists(st.floats(0.0, 10.0), min_size=2, max_size=9), st.floats(0.1, 10.0))
def test_the_slowest_rank_lags_by_its_distance_to_the_median(
    rank_seconds: Any, seconds: float
) -> None:
    slowest = Stragglers(0.1, 3).add_step(rank_seconds, seconds, 8)
    assert slowest is not None and rank_seconds[slowest.rank] == max(rank_seconds)
    middle = sorted(rank_seconds)[(len(rank_seconds) - 1) // 2]
    assert slowest.lag == pytest.approx((max(rank_seconds) - middle) / seconds)
    assert slowest.steps == (slowest.lag > 0.1)


def test_the_slowest_rank_is_in_the_metrics_and_a_straggler_on_the_terminal(records: Any) -> None:
    run = records()
    recorder = run.open()
    recorder.stragglers = Stragglers(0.2, 3)
    for number in range(4):
        record = run.step(number)
        recorder.step_done(
            replace(record, stats=replace(record.stats, metrics={"own_seconds": (0.1, 0.3)}))
        )
    recorder.close()
    metrics = run.lines("metrics")
    assert metrics[2] | Slowest(1, 0.5, 3).entry() == metrics[2]
    assert step_scalars(metrics[2])["speed/slowest_lag"] == 0.5
    [event] = [line for line in run.lines("events") if line["event"] == BEGINS]
    assert (event["step"], event["rank"]) == (2, 1)
    text = "rank 1 is slow: since step 0 the other ranks wait for it in 50% of each step"
    assert event["what"] == text and text in run.terminal.getvalue()


@pytest.mark.slow
def test_a_slow_rank_is_found_in_a_run(two_ranks: Ranks, tmp_path: Path) -> None:
    """In the control run no rank is slow."""
    result = {}
    for name, slow in {"slow": 1, "control": None}.items():
        (tmp_path / name).mkdir()
        result[name] = two_ranks.run("slowed", tmp_path / name, slow)[0]
    events = [(item["event"], item["step"], item["rank"]) for item in result["slow"]["events"]]
    assert events == [(BEGINS, 2, 1), (ENDS, 7, 1)]
    assert result["control"]["events"] == []
    steps = [item["slowest_steps"] for item in result["slow"]["metrics"]]
    assert steps == [1, 2, 3, 4, 5, 0, 0, 0]
    assert all(item["slowest_lag"] == 0 for item in result["control"]["metrics"])


@pytest.mark.parametrize("bound", [-0.1, 1.0, 5.0, math.nan])
def test_a_bound_that_no_rank_can_pass_is_refused(bound: float) -> None:
    with pytest.raises(ValueError, match="straggler is a part of a step"):
        WatchConfig(straggler=bound)
