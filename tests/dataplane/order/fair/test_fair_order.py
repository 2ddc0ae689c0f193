"""The order of shares that no small table holds, against fractions, row by row."""

from __future__ import annotations

from fractions import Fraction
from math import floor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataplane.order.fair import slow_jobs
from headrace.dataplane.order.fair.fair_order import FairOrder
from headrace.dataplane.order.fair.owed import Line, OwedRows
from headrace.dataplane.order.fair.slow_jobs import SlowJobs, assign_slow_jobs, serve_earliest_due

BLOCK = 16


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks so short that slow jobs, fast jobs and several blocks meet in small plans."""
    monkeypatch.setattr(slow_jobs, "BLOCKS", (BLOCK,))


@st.composite
def vectors(draw: st.DrawFn, sources: int, total: int) -> tuple[int, ...]:
    """Draw integers that sum to `total`, some of them 0, some tiny."""
    sizes = st.one_of(st.just(0), st.integers(1, 9), st.integers(1, 10**6))
    parts = draw(st.lists(sizes, min_size=sources, max_size=sources).filter(any))
    shares = [part * total // sum(parts) for part in parts]
    shares[parts.index(max(parts))] += total - sum(shares)
    return tuple(shares)


@st.composite
def lines(draw: st.DrawFn) -> list[Line]:
    sources = draw(st.integers(1, 7))
    result = []
    for _ in range(draw(st.integers(1, 3))):
        total = draw(st.sampled_from([1, 6, 100, 10**7, 10**13]))
        start = draw(vectors(sources, total))
        end = draw(st.one_of(st.just(start), vectors(sources, total)))
        result.append(Line(draw(st.integers(1, 200)), start, end))
    return result


def owed_after(lines: list[Line]) -> list[list[Fraction]]:
    """Reference: the rows that each source is owed after every number of rows."""
    owed = [Fraction(0)] * len(lines[0].start)
    history = [owed]
    for line in lines:
        whole = 2 * line.rows * sum(line.start)
        for row in range(line.rows):
            # The share of a row is that in its middle.
            owed = [
                before + Fraction(2 * line.rows * start + (end - start) * (2 * row + 1), whole)
                for before, start, end in zip(owed, line.start, line.end, strict=True)
            ]
            history.append(owed)
    return history


def order_of(lines: list[Line]) -> FairOrder:
    owed = OwedRows(lines)
    return FairOrder(owed, SlowJobs(owed, assign_slow_jobs(owed)))


def largest_error(sources: list[int], history: list[list[Fraction]]) -> Fraction:
    counts = [0] * len(history[0])
    largest = Fraction(0)
    for source, owed in zip(sources, history[1:], strict=True):
        counts[source] += 1
        off = (abs(count - due) for count, due in zip(counts, owed, strict=True))
        largest = max(largest, *off)
    return largest


@given(lines())
@settings(max_examples=40, deadline=None)
def test_every_source_is_less_than_a_row_off_at_every_row(lines: list[Line]) -> None:
    order, history = order_of(lines), owed_after(lines)
    sources, draws = order.locate(np.arange(order.rows))
    assert largest_error(sources.tolist(), history) < 1
    counts = np.zeros(order.num_sources, np.int64)
    for row, (source, draw) in enumerate(zip(sources.tolist(), draws.tolist(), strict=True)):
        if row % 7 == 0:
            assert order.counts(row).tolist() == counts.tolist()
        assert draw == counts[source], "draws count up"
        counts[source] += 1
    assert order.counts(order.rows).tolist() == counts.tolist()
    for source in range(order.num_sources):
        expected = [*np.flatnonzero(sources == source).tolist(), order.rows]
        assert order.locate_draws(source, np.arange(len(expected))).tolist() == expected


@given(lines(), st.data())
@settings(max_examples=30, deadline=None)
def test_a_row_does_not_depend_on_the_rows_located_before(
    lines: list[Line], data: st.DataObject
) -> None:
    order = order_of(lines)
    whole = order.locate(np.arange(order.rows))
    rows = data.draw(st.lists(st.integers(0, order.rows - 1), min_size=1, max_size=5))
    fresh = order_of(lines).locate(np.array(rows))
    assert fresh[0].tolist() == whole[0][rows].tolist()
    assert fresh[1].tolist() == whole[1][rows].tolist()


@given(lines(), st.data())
@settings(max_examples=40, deadline=None)
def test_windows_of_jobs_are_exact(lines: list[Line], data: st.DataObject) -> None:
    owed, history = OwedRows(lines), owed_after(lines)
    source = data.draw(st.integers(0, owed.num_sources - 1))
    mine = [item[source] for item in history]
    whole, more = owed.whole_rows(owed.rows)
    assert (whole[source], more[source]) == (floor(mine[-1]), mine[-1] != floor(mine[-1]))
    jobs = np.arange(1, whole[source] + more[source] + 1)
    sources = np.full(len(jobs), source)
    for job, release, due in zip(
        jobs.tolist(),
        owed.release(sources, jobs).tolist(),
        owed.due(sources, jobs).tolist(),
        strict=True,
    ):
        fits = [row for row in range(owed.rows) if mine[row] < job < mine[row + 1] + 1]
        assert release == fits[0]
        assert due == (owed.rows if mine[-1] < job else fits[-1])


def test_serving_the_earliest_released_first_would_be_off_by_more() -> None:
    """The test can fail: with another rule than the earliest due first, a bound is missed."""
    lines = [Line(400, (70, 11, 9, 6, 4), (4, 6, 9, 11, 70))]
    owed, history = OwedRows(lines), owed_after(lines)
    counts = owed.whole_rows(owed.rows)[0]
    sources = np.repeat(np.arange(5), counts)
    jobs = np.concatenate([np.arange(1, count + 1) for count in counts.tolist()])
    first_come = np.lexsort((sources, owed.release(sources, jobs)))
    assert largest_error(sources[first_come].tolist(), history[: len(jobs) + 1]) >= 1
    assert largest_error(order_of(lines).locate(np.arange(400))[0].tolist(), history) < 1


def test_serve_takes_the_earliest_due() -> None:
    rows, release, due = np.array([2, 3, 7]), np.array([0, 3, 0]), np.array([9, 3, 8])
    assert serve_earliest_due(rows, release, due).tolist() == [2, 1, 0]
    with pytest.raises(AssertionError, match="within its bounds"):
        serve_earliest_due(rows, release, np.array([9, 2, 8]))


@pytest.mark.slow
def test_two_thousand_sources_of_seven_decimals(monkeypatch: pytest.MonkeyPatch) -> None:
    """At some rows of a plan of a billion: shares that change, and tiny ones among them."""
    monkeypatch.undo()
    rng = np.random.default_rng(0)
    start, end = (
        rng.multinomial(10**7 - 2_000, (p := rng.uniform(0, 1, 2_000) ** 9) / p.sum()) + 1
        for _ in range(2)
    )
    lines = [Line(10**9, tuple(start.tolist()), tuple(end.tolist()))]
    order = order_of(lines)
    for row in (123_456_789, 10**9 - 1):
        owed = order.owed.exact_rows(row)
        counts = order.counts(row).tolist()
        assert sum(counts) == row
        assert max(abs(count - due) for count, due in zip(counts, owed, strict=True)) < 1
