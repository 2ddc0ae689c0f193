from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from headrace.dataplane.order import stream as streams
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.order.source_order import Draws
from headrace.dataplane.order.stream import Stream

Rows = list[tuple[int, int, list[tuple[int, int]]]]


def walk(plan: Plan) -> Rows:
    """Return (source, epoch, spans of tokens) of every row."""
    stream = Stream(plan)
    rows: Rows = []
    for phase in plan.phases:
        located = stream.locate(np.arange(phase.first_row, phase.end_row))
        places = zip(located.sources.tolist(), located.epochs.tolist(), strict=True)
        rows += [
            (source, epoch, located.spans(place)) for place, (source, epoch) in enumerate(places)
        ]
    return rows


def tokens_by_epoch(plan: Plan) -> Counter[tuple[int, int, int]]:
    """Count how often each (source, epoch, token) is served."""
    seen: Counter[tuple[int, int, int]] = Counter()
    for source, epoch, spans in walk(plan):
        seen.update((source, epoch, token) for span in spans for token in range(*span))
    return seen


def test_each_token_is_served_at_most_once_per_epoch(two_phases: Plan) -> None:
    seen = tokens_by_epoch(two_phases)
    assert set(seen.values()) == {1}
    assert {epoch for source, epoch, _ in seen if source == 0} == {0, 1}


def test_epochs_are_whole_through_changes_of_length(changing: Plan) -> None:
    """All tokens of an epoch that has ended, up to less than a row, in rows of one span and of
    several."""
    longest = max(phase.seq_len for phase in changing.phases)
    assert max(len(spans) for _, _, spans in walk(changing)) > 1
    seen = tokens_by_epoch(changing)
    assert set(seen.values()) == {1}
    sizes = Counter((source, epoch) for source, epoch, _ in seen)
    ended = {key: size for key, size in sizes.items() if sizes[key[0], key[1] + 1]}
    assert len(ended) >= 2
    for (source, _), size in ended.items():
        assert 0 <= changing.sources[source].order.tokens - 1 - size < longest


def test_a_row_does_not_depend_on_the_rows_located_with_it(changing: Plan) -> None:
    stream = Stream(changing)
    rows = walk(changing)
    for row in range(0, changing.rows, 7):
        located = stream.locate(np.array([row]))
        alone = (int(located.sources[0]), int(located.epochs[0]), located.spans(0))
        assert alone == rows[row]


def test_blocks_located_together_equal_blocks_located_alone(
    changing: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any cuts, and across a change of length."""
    stream = Stream(changing)
    edges = [phase.end_row for phase in changing.phases]
    cuts = sorted({*np.random.default_rng(0).integers(1, edges[-1], 60).tolist(), *edges})
    blocks = [np.arange(first, last) for first, last in pairwise([0, *cuts])]
    for ahead in (1, 37, 10_000):
        monkeypatch.setattr(streams, "BATCH_ROWS", ahead)
        for block, located in zip(blocks, stream.locate_blocks(iter(blocks)), strict=True):
            alone = stream.locate(block)
            assert located.length == alone.length
            for name in ("rows", "sources", "epochs", "tokens"):
                assert np.array_equal(getattr(located, name), getattr(alone, name))
            for place in range(len(block)):
                assert located.spans(place) == alone.spans(place)


def test_positions_are_those_of_the_next_rows(two_phases: Plan) -> None:
    stream, rows = Stream(two_phases), walk(two_phases)
    for row in (0, 1, 100, 700):
        positions = stream.positions(row)
        for index in (0, 1):  # math has no row in this phase
            later = next(number for number in range(row, len(rows)) if rows[number][0] == index)
            order = two_phases.sources[index].order
            here = Draws([order], [positions[index]], 64)
            epoch, token, _ = here.locate(np.array([0]), np.array([0]))
            assert (int(epoch[0]), int(token[0])) == (rows[later][1], rows[later][2][0][0])


def test_a_shortage_names_the_first_missing_row(two_phases: Plan) -> None:
    short = replace(two_phases.sources[0], max_epochs=1)
    plan = replace(two_phases, sources=(short, *two_phases.sources[1:]))
    (short,) = Stream(plan).shortages()
    assert (short.source, short.phase) == ("web", "stable") and "at row" in short.why
    row = short.row
    rows = walk(two_phases)
    assert rows[row][:2] == (0, 1)  # the first row of web's second epoch
    assert all(epoch == 0 for source, epoch, _ in rows[:row] if source == 0)
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


def test_rows_with_equals_a_search_over_all_rows(changing: Plan) -> None:
    stream = Stream(changing)
    rng = np.random.default_rng(0)
    rows = walk(changing)
    for source, planned in enumerate(changing.sources):
        starts = rng.integers(0, planned.order.tokens, 40)
        ends = starts + rng.integers(0, 300, 40)
        walked = [
            (query, number)
            for query, (start, end) in enumerate(zip(starts, ends, strict=True))
            for number, (row_source, _, spans) in enumerate(rows)
            if row_source == source and any(max(low, start) < min(high, end) for low, high in spans)
        ]
        assert list(zip(*stream.find_rows(source, starts, ends), strict=True)) == walked
