from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataplane.order.apportionment import Assignment, Segment, carried


@st.composite
def segment_lists(
    draw: st.DrawFn, *, one_length: bool = True, sources: int | None = None
) -> list[Segment]:
    sources = sources or draw(st.integers(1, 6))
    found = []
    for _ in range(draw(st.integers(1, 4))):
        weights = draw(st.lists(st.integers(0, 12), min_size=sources, max_size=sources).filter(any))
        tokens = 8 if one_length else draw(st.sampled_from([8, 16, 1024]))
        rows = draw(st.integers(1, sum(weights) * 9 + 3))
        found.append(Segment(rows, tuple(weights), tokens))
    return found


def walk(
    segments: list[Segment], owed: list[Fraction] | None = None
) -> tuple[list[int], list[list[Fraction]]]:
    """The slow twin of the accounts: every row's source, and every debt in tokens after it."""
    assignment = Assignment(segments, owed)
    sources, draws = assignment.locate(np.arange(assignment.rows))
    debts = list(owed or [Fraction(0)] * assignment.sources)
    taken = [0] * assignment.sources
    history = []
    row = 0
    for segment in segments:
        for _ in range(segment.rows):
            source = int(sources[row])
            assert draws[row] == taken[source]
            taken[source] += 1
            for index, weight in enumerate(segment.weights):
                debts[index] += Fraction(weight * segment.row_tokens, segment.period)
            debts[source] -= segment.row_tokens
            history.append(list(debts))
            row += 1
            if row % 13 == 0:
                assert assignment.counts(row).tolist() == taken
                assert assignment.debts(row) == debts
    return sources.tolist(), history


@given(segment_lists())
@settings(max_examples=150, deadline=None)
def test_every_debt_stays_under_one_row_at_every_row(segments: list[Segment]) -> None:
    _, history = walk(segments)
    assert max(abs(debt) for debts in history for debt in debts) < segments[0].row_tokens


def lengthened(segments: list[Segment]) -> list[Segment]:
    """The same segments, the shorter rows first."""
    lengths = sorted(segment.row_tokens for segment in segments)
    return [
        Segment(segment.rows, segment.weights, length)
        for segment, length in zip(segments, lengths, strict=True)
    ]


@given(segment_lists(one_length=False))
@settings(max_examples=150, deadline=None)
def test_with_rows_that_grow_debts_stay_under_the_longest(segments: list[Segment]) -> None:
    _, history = walk(lengthened(segments))
    longest = max(segment.row_tokens for segment in segments)
    assert max(abs(debt) for debts in history for debt in debts) < longest


@given(segment_lists(one_length=False))
@settings(max_examples=150, deadline=None)
def test_with_rows_that_shrink_debts_stay_under_two_of_the_longest(segments: list[Segment]) -> None:
    _, history = walk(segments)
    longest = max(segment.row_tokens for segment in segments)
    assert max(abs(debt) for debts in history for debt in debts) < 2 * longest


@given(segment_lists(), st.data())
@settings(max_examples=60, deadline=None)
def test_any_row_alone_is_what_it_is_among_others(
    segments: list[Segment], data: st.DataObject
) -> None:
    assignment = Assignment(segments)
    sources, draws = assignment.locate(np.arange(assignment.rows))
    rows = data.draw(st.lists(st.integers(0, assignment.rows - 1), min_size=1, max_size=9))
    some = assignment.locate(np.array(rows))
    assert some[0].tolist() == sources[rows].tolist()
    assert some[1].tolist() == draws[rows].tolist()


def test_without_weight_a_source_is_served_only_what_it_was_owed() -> None:
    segments = [Segment(7, (3, 2, 2), 8), Segment(500, (0, 1, 1), 8)]
    sources, history = walk(segments)
    late = sources[7:].count(0)
    assert late <= 1
    assert late == 0 or history[6][0] > 0


def test_whole_periods_are_exact() -> None:
    weights = (70, 20, 9, 1)
    assignment = Assignment([Segment(100 * 50, weights, 8)])
    for turn in (1, 2, 17, 50):
        assert assignment.counts(100 * turn).tolist() == [turn * weight for weight in weights]


def test_a_trillion_rows_cost_three_tables() -> None:
    assignment = Assignment([Segment(10**12, (8, 1, 1), 4096)])
    assert sum(len(piece.table) for piece in assignment.pieces) < 100
    sources, draws = assignment.locate(np.array([10**11, 10**12 - 1]))
    assert draws[1] == assignment.counts(10**12 - 1)[sources[1]]
    assert assignment.counts(10**12).tolist() == [8 * 10**11, 10**11, 10**11]


def test_debts_carried_in_are_worked_off() -> None:
    owed = [Fraction(6), Fraction(-6)]
    assignment = Assignment([Segment(40, (1, 1), 8)], owed)
    assert assignment.debts(0) == owed
    assert all(abs(debt) < 8 for row in range(41) for debt in assignment.debts(row))


def test_what_nobody_could_keep_is_not_carried() -> None:
    """Of twenty equal sources two are owed 0.9 rows; who gives each half can serve one of them."""
    before = Assignment([Segment(20, (1,) * 20, 8)]).debts(18)
    assert sorted(before)[-3:] == [Fraction(-8, 10), Fraction(72, 10), Fraction(72, 10)]
    owed = [debt if debt > 0 else Fraction(-144, 180) for debt in before]
    halves = [Segment(9, tuple(int(debt > 0) for debt in before), 8)]
    _, whole = walk(halves, owed)
    assert max(whole[0]) == Fraction(112, 10), "1.4 rows, whichever of the two is served"
    part = carried(halves, owed)
    assert any(part) and part == [debt * part[0] / owed[0] for debt in owed]
    _, history = walk(halves, part)
    assert max(abs(debt) for debts in history for debt in debts) < 8


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_carried_debts_stay_under_one_row_whatever_comes_after(data: st.DataObject) -> None:
    before = data.draw(segment_lists(one_length=False))
    first = Assignment(before)
    owed = first.debts(data.draw(st.integers(0, first.rows)))
    after = lengthened(data.draw(segment_lists(one_length=False, sources=first.sources)))
    part = carried(after, owed)
    assert sum(part) == 0
    _, history = walk(after, part)
    longest = max(segment.row_tokens for segment in after)
    assert max(abs(debt) for debts in [part, *history] for debt in debts) < longest


def test_plain_rounding_would_not_hold_the_bound() -> None:
    """Negative control: serving whoever is owed most (Sainte-Laguë's rule) passes one row."""
    weights = np.array([60, 9, 9, 9, 9, 1, 1, 1, 1])
    shares = weights / weights.sum()
    taken = np.zeros(len(weights))
    worst = 0.0
    for row in range(1, 2001):
        source = int(np.argmax(shares / (2 * taken + 1)))
        taken[source] += 1
        worst = max(worst, float(abs(taken - shares * row).max()))
    assert worst > 1
    segment = Segment(2000, tuple(weights.tolist()), 1)
    _, history = walk([segment])
    assert max(abs(debt) for debts in history for debt in debts) < 1


@pytest.mark.parametrize("sources", [1, 2, 40])
def test_how_many_sources_does_not_matter(sources: int) -> None:
    weights = tuple(range(1, sources + 1))
    _, history = walk([Segment(3 * sum(weights), weights, 1)])
    assert max(abs(debt) for debts in history for debt in debts) < 1
