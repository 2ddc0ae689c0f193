from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataplane.order.apportionment import Assignment
from headrace.dataplane.order.simulation import Segment


@st.composite
def segment_lists(
    draw: st.DrawFn, *, one_length: bool = True, sources: int | None = None
) -> list[Segment]:
    sources = sources or draw(st.integers(1, 6))
    segments = []
    for _ in range(draw(st.integers(1, 4))):
        weights = draw(st.lists(st.integers(0, 12), min_size=sources, max_size=sources).filter(any))
        tokens = 8 if one_length else draw(st.sampled_from([8, 16, 1024]))
        rows = draw(st.integers(1, sum(weights) * 9 + 3))
        segments.append(Segment(rows, tuple(weights), tokens))
    return segments


def walk(segments: list[Segment]) -> tuple[list[int], list[list[Fraction]]]:
    """Reference implementation: the source of every row, and all debts in tokens after it."""
    assignment = Assignment(segments)
    sources, draws = assignment.locate(np.arange(assignment.rows))
    debts = [Fraction(0)] * assignment.num_sources
    taken = [0] * assignment.num_sources
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
def test_debts_stay_below_one_row(segments: list[Segment]) -> None:
    _, history = walk(segments)
    assert max(abs(debt) for debts in history for debt in debts) < segments[0].row_tokens


def lengthened(segments: list[Segment]) -> list[Segment]:
    """Return the segments with their row lengths in ascending order."""
    lengths = sorted(segment.row_tokens for segment in segments)
    return [
        Segment(segment.rows, segment.weights, length)
        for segment, length in zip(segments, lengths, strict=True)
    ]


@given(segment_lists(one_length=False))
@settings(max_examples=150, deadline=None)
def test_with_growing_rows_debts_stay_below_the_longest(segments: list[Segment]) -> None:
    _, history = walk(lengthened(segments))
    longest = max(segment.row_tokens for segment in segments)
    assert max(abs(debt) for debts in history for debt in debts) < longest


@given(segment_lists(one_length=False))
@settings(max_examples=150, deadline=None)
def test_with_shrinking_rows_debts_stay_below_two_of_the_longest(segments: list[Segment]) -> None:
    _, history = walk(segments)
    longest = max(segment.row_tokens for segment in segments)
    assert max(abs(debt) for debts in history for debt in debts) < 2 * longest


@given(segment_lists(), st.data())
@settings(max_examples=60, deadline=None)
def test_a_row_does_not_depend_on_the_rows_located_with_it(
    segments: list[Segment], data: st.DataObject
) -> None:
    assignment = Assignment(segments)
    sources, draws = assignment.locate(np.arange(assignment.rows))
    rows = data.draw(st.lists(st.integers(0, assignment.rows - 1), min_size=1, max_size=9))
    some = assignment.locate(np.array(rows))
    assert some[0].tolist() == sources[rows].tolist()
    assert some[1].tolist() == draws[rows].tolist()


def test_a_source_without_weight_gets_only_the_rows_it_was_owed() -> None:
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
    assert len(assignment.tables.table) < 100
    sources, draws = assignment.locate(np.array([10**11, 10**12 - 1]))
    assert draws[1] == assignment.counts(10**12 - 1)[sources[1]]
    assert assignment.counts(10**12).tolist() == [8 * 10**11, 10**11, 10**11]


def test_plain_rounding_exceeds_the_bound() -> None:
    """Negative control: taking the largest debt (Sainte-Laguë's rule) exceeds one row."""
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
def test_the_bound_holds_for_any_number_of_sources(sources: int) -> None:
    weights = tuple(range(1, sources + 1))
    _, history = walk([Segment(3 * sum(weights), weights, 1)])
    assert max(abs(debt) for debts in history for debt in debts) < 1
