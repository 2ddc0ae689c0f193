from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from headrace.dataplane.order import stream as streams
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.stream import Stream


def walk(plan: Plan) -> list[tuple[int, int, int, int]]:
    """Return (source, epoch, first token, length) of every row."""
    stream = Stream(plan)
    rows = []
    for phase in plan.phases:
        located = stream.locate(np.arange(phase.first_row, phase.last_row))
        rows += [
            (source, epoch, token, phase.seq_len)
            for source, epoch, token in zip(
                located.sources.tolist(),
                located.epochs.tolist(),
                located.tokens.tolist(),
                strict=True,
            )
        ]
    return rows


def test_each_token_is_served_at_most_once_per_epoch(two_phases: Plan) -> None:
    seen: Counter[tuple[int, int, int]] = Counter()
    for source, epoch, first, length in walk(two_phases):
        seen.update((source, epoch, token) for token in range(first, first + length))
    assert set(seen.values()) == {1}
    assert {epoch for source, epoch, _ in seen if source == 0} == {0, 1}


def test_a_row_does_not_depend_on_the_rows_located_with_it(two_phases: Plan) -> None:
    stream = Stream(two_phases)
    rows = walk(two_phases)
    for row in range(0, two_phases.rows, 37):
        located = stream.locate(np.array([row]))
        alone = (int(located.sources[0]), int(located.epochs[0]), int(located.tokens[0]))
        assert alone == rows[row][:3]


def test_blocks_located_together_equal_blocks_located_alone(
    two_phases: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any cuts, and across a change of length."""
    stream = Stream(two_phases)
    edges = [phase.last_row for phase in two_phases.phases]
    cuts = sorted({*np.random.default_rng(0).integers(1, edges[-1], 60).tolist(), *edges})
    blocks = [np.arange(first, last) for first, last in pairwise([0, *cuts])]
    for ahead in (1, 37, 10_000):
        monkeypatch.setattr(streams, "AHEAD", ahead)
        for block, located in zip(blocks, stream.locate_blocks(iter(blocks)), strict=True):
            alone = stream.locate(block)
            assert located.length == alone.length
            for name in ("rows", "sources", "epochs", "tokens"):
                assert np.array_equal(getattr(located, name), getattr(alone, name))


def test_positions_are_those_of_the_next_rows(two_phases: Plan) -> None:
    stream, rows = Stream(two_phases), walk(two_phases)
    for row in (0, 1, 100, 700):
        positions = stream.positions(row)
        for index in (0, 1):  # math has no row in this phase
            later = next(number for number in range(row, len(rows)) if rows[number][0] == index)
            order = two_phases.sources[index].order
            epoch, token = order.offsets(positions[index], 64, np.array([0]))
            assert (int(epoch[0]), int(token[0])) == rows[later][1:3]


def test_a_shortage_names_the_first_missing_row(two_phases: Plan) -> None:
    short = replace(two_phases.sources[0], max_epochs=1)
    plan = replace(two_phases, sources=(short, *two_phases.sources[1:]))
    (short,) = Stream(plan).shortages()
    assert (short.source, short.phase) == ("web", "stable") and "at row" in short.why
    row = short.row
    rows = walk(two_phases)
    assert rows[row][:2] == (0, 1)  # the first row of web's second epoch
    assert all(epoch == 0 for source, epoch, _, _ in rows[:row] if source == 0)
    assert not list(Stream(two_phases).shortages())


def test_a_row_of_ten_trillion_tokens_is_located_at_once(two_phases: Plan) -> None:
    """The cost of a row does not grow with the plan: only tables are stored."""
    sources = tuple(
        replace(source, max_epochs=10, order=replace(source.order, tokens=10**13, chunk=1 << 20))
        for source in two_phases.sources
    )
    stable = replace(two_phases.phases[0], rows=10**11, batch_rows=100)
    stretch = replace(stable.stretches[0], rows=10**11)
    plan = replace(two_phases, sources=sources, phases=(replace(stable, stretches=(stretch,)),))
    stream = Stream(plan)
    located = stream.locate(np.array([10**11 - 1]))
    assert 0 <= located.tokens[0] < 10**13
    assert stream.assignment.tables.table.nbytes < 10_000


def test_rows_with_equals_a_search_over_all_rows(two_phases: Plan) -> None:
    stream = Stream(two_phases)
    rng = np.random.default_rng(0)
    rows = walk(two_phases)
    for source, planned in enumerate(two_phases.sources):
        for start in rng.integers(0, planned.order.tokens, 40).tolist():
            end = start + int(rng.integers(1, 300))
            walked = [
                number
                for number, (other, _, token, length) in enumerate(rows)
                if other == source and token < end and token + length > start
            ]
            assert stream.rows_with(source, start, end).tolist() == walked
