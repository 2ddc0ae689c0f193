from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.plain_order import row_at

from headrace.dataplane.arrays import Int64
from headrace.dataplane.order.source_order import Draws, Position, SourceOrder, UnservedTokens


@dataclass
class Case:
    order: SourceOrder
    length: int


@st.composite
def cases(draw: st.DrawFn, max_windows: int = 5) -> Case:
    """Draw an order of up to `max_windows` windows, and the length of its rows."""
    length = draw(st.sampled_from([1, 2, 3, 8]))
    chunk = length * 4 * draw(st.integers(1, 5))
    window = draw(st.integers(1, 5))
    tokens = draw(st.integers(length + 1, chunk * window * max_windows))
    seed, direction = draw(st.integers(0, 99)), draw(st.sampled_from([0, 0, 1, -1]))
    order = SourceOrder(
        seed=seed, name="web", tokens=tokens, chunk=chunk, window=window, direction=direction
    )
    return Case(order, length)


def locate(
    order: SourceOrder, start: Position, length: int, draws: Int64
) -> tuple[Int64, Int64, dict[int, Int64]]:
    return Draws([order], [start], length).locate(np.zeros(len(draws), np.int64), draws)


def served(order: SourceOrder, start: Position, length: int, rows: int) -> list[int]:
    """Return the tokens of the first `rows` rows in one list."""
    _, firsts, pieces = locate(order, start, length, np.arange(rows))
    served = []
    for row, first in enumerate(firsts.tolist()):
        spans = pieces.get(row, np.array([[first, first + length]])).tolist()
        assert spans[0][0] == first and sum(end - start for start, end in spans) == length
        served += [token for start, end in spans for token in range(start, end)]
    return served


@given(cases())
@settings(max_examples=150, deadline=None)
def test_an_epoch_serves_each_token_once_except_less_than_a_row(case: Case) -> None:
    order, length = case.order, case.length
    rows = order.end_row(0, length)
    epochs, _, _ = locate(order, Position(), length, np.arange(2 * rows))
    assert epochs.tolist() == [0] * rows + [1] * rows
    tokens = served(order, Position(), length, rows)
    assert len(set(tokens)) == len(tokens)
    assert max(tokens) <= order.tokens - 2  # the last token is a target only
    assert order.tokens - 1 - len(tokens) < length


@given(cases())
@settings(max_examples=60, deadline=None)
def test_epochs_differ(case: Case) -> None:
    order, length = case.order, case.length
    rows = order.end_row(0, length)
    _, firsts, _ = locate(order, Position(), length, np.arange(3 * rows))
    if rows > 12 and (not order.direction or rows > length * 40):
        orders = {tuple(part) for part in firsts.reshape(3, rows).tolist()}
        assert len(orders) == 3


@given(cases())
@settings(max_examples=60, deadline=None)
def test_a_window_holds_at_most_its_chunks(case: Case) -> None:
    """Locality bounds the cache."""
    order, length = case.order, case.length
    in_window = order.window * (order.chunk // length)
    rows = order.end_row(0, length)
    _, firsts, _ = locate(order, Position(), length, np.arange(rows))
    for first in range(0, rows, in_window):
        chunks = set((firsts[first : first + in_window] // order.chunk).tolist())
        assert len(chunks) <= order.window + 1  # and a tail


@given(cases(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_continuation_serves_the_rest_of_an_epoch_once(case: Case, data: st.DataObject) -> None:
    order, length = case.order, case.length
    drawn = data.draw(st.integers(0, order.end_row(0, length) - 1))
    grown = data.draw(st.sampled_from([0, 1, 50, 300]))
    times = data.draw(st.integers(1, 3))
    here = order.advance(Position(), length, drawn)
    child = SourceOrder(
        seed=order.seed,
        name=order.name,
        tokens=order.tokens + grown,
        chunk=order.chunk * times,
        window=order.window,
        direction=order.direction,
        unserved=UnservedTokens(order=order, position=here, length=length),
    )
    start = Position(epoch=here.epoch)
    rows = child.end_row(here.epoch, length)
    before = served(order, Position(), length, drawn)
    after = served(child, start, length, rows)
    assert len(set(after)) == len(after)
    assert not set(before) & set(after)
    assert not after or max(after) <= child.tokens - 2
    assert len(before) + len(after) > child.tokens - 1 - length
    # The next epoch holds all tokens again.
    assert child.end_row(here.epoch + 1, length) == (child.tokens - 1) // length


@given(cases(), st.sampled_from([1, -1]))
@settings(max_examples=60, deadline=None)
def test_a_sorted_source_is_shuffled_within_windows_alone(case: Case, direction: int) -> None:
    order, length = replace(case.order, direction=direction), case.length
    rows = order.end_row(0, length)
    tokens = served(order, Position(), length, rows)
    in_window = order.window * order.chunk
    windows = [tokens[first : first + in_window] for first in range(0, len(tokens), in_window)]
    if len(windows) > 1 and len(windows[-1]) < order.chunk:  # the tail belongs to the last window
        windows[-2:] = [windows[-2] + windows[-1]]
    for earlier, later in pairwise(windows):
        if direction > 0:
            assert max(earlier) < min(later)
        else:
            assert min(earlier) > max(later)


def test_a_row_does_not_depend_on_the_rows_located_with_it() -> None:
    order = SourceOrder(seed=1, name="a", tokens=10**12, chunk=1 << 20, window=64)
    draws = np.array([0, 5, 10**7, 10**8 - 1, 3 * 10**8])
    epochs, firsts, _ = locate(order, Position(), 4096, draws)
    for number, draw in enumerate(draws.tolist()):
        epoch, first, _ = locate(order, Position(row=draw), 4096, np.array([0]))
        assert (epoch[0], first[0]) == (epochs[number], firsts[number])


@dataclass
class Changed:
    """An order with a position that changes of the row length have led to."""

    order: SourceOrder
    position: Position
    length: int
    served: list[int]
    """The tokens that the position's epoch has served before."""


@st.composite
def changed(draw: st.DrawFn, max_windows: int = 5, last: int | None = None) -> Changed:
    """Draw an order of up to `max_windows` windows, which may continue another, and up to four
    changes of the length; `last` is the length after them."""
    order = draw(cases(max_windows)).order
    lengths = [item for item in range(1, order.chunk + 1) if order.chunk % item == 0]
    length = draw(st.sampled_from(lengths))
    if draw(st.booleans()) and order.end_row(0, length):
        drawn = draw(st.integers(0, order.end_row(0, length) - 1))
        rest = UnservedTokens(order=order, position=Position(row=drawn), length=length)
        order = replace(order, tokens=order.tokens + draw(st.sampled_from([0, 30])), unserved=rest)
    position = Position(epoch=draw(st.sampled_from([0, 0, 1])))
    taken: list[int] = []
    changes = draw(st.integers(0, 4))
    for change in range(changes if last is None else changes + 1):
        remaining = order.end_row(position.epoch, length, position.cuts) - position.row
        rows = draw(st.integers(0, max(remaining - 1, 0)))
        taken += served(order, position, length, rows)
        position = order.advance(position, length, rows)
        new_length = last if last and change == changes else draw(st.sampled_from(lengths))
        position = order.change_length(position, length, new_length)
        length = new_length
    return Changed(order, position, length, taken)


@given(changed())
@settings(max_examples=200, deadline=None)
def test_changes_of_length_lose_nothing(case: Changed) -> None:
    """The oracle is the set of the epoch's tokens: each is served once, up to less than a row."""
    order, position, length = case.order, case.position, case.length
    if position.epoch or order.unserved is None:
        tokens = list(range(order.tokens - 1))
    else:  # an independent list: the parent's tokens without the rows that it has served
        parent = order.unserved
        gone = set(served(parent.order, Position(), parent.length, parent.position.row))
        tokens = [token for token in range(order.tokens - 1) if token not in gone]
    rows = order.end_row(position.epoch, length, position.cuts) - position.row
    last = served(order, position, length, rows)
    every = case.served + last
    assert len(set(every)) == len(every)
    assert set(every) <= set(tokens)
    missing = len(tokens) - len(every)
    assert 0 <= missing < length
    assert order.tokens_left(position, length) == len(last) + missing
    # Rows do not depend on the rows located with them, and the next epoch is whole again.
    more = np.arange(rows + 3 * (order.end_row(position.epoch + 1, length) >= 3))
    epochs, firsts, pieces = locate(order, position, length, more)
    assert epochs.tolist() == [position.epoch + (row >= rows) for row in more.tolist()]
    for row in more[:: max(1, rows // 7)].tolist():
        _, first, parts = locate(order, position, length, np.array([row]))
        assert first[0] == firsts[row]
        assert (0 in parts) == (row in pieces)
        assert 0 not in parts or np.array_equal(parts[0], pieces[row])


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_rows_of_many_sources_equal_those_of_the_definition(data: st.DataObject) -> None:
    """Located by one call, in any order; each is compared with a walk over lists of tokens."""
    length = data.draw(st.sampled_from([1, 2, 4]))
    cases = data.draw(st.lists(changed(max_windows=2, last=length), min_size=1, max_size=4))
    orders = [replace(case.order, name=f"s{place}") for place, case in enumerate(cases)]
    starts = [case.position for case in cases]
    drawn = [
        place
        for place, order in enumerate(orders)
        if order.end_row(starts[place].epoch + 1, length)
    ]
    rows = st.lists(st.tuples(st.sampled_from(drawn), st.integers(0, 400)), max_size=30)
    pairs = data.draw(rows) if drawn else []
    sources, draws = np.array(pairs, np.int64).reshape(-1, 2).T
    epochs, firsts, pieces = Draws(orders, starts, length).locate(sources, draws)
    for row, (source, draw) in enumerate(pairs):
        epoch, tokens = row_at(orders[source], starts[source], length, draw)
        spans = pieces.get(row, np.array([[firsts[row], firsts[row] + length]])).tolist()
        assert (epochs[row], spans[0][0]) == (epoch, firsts[row])
        assert [token for start, end in spans for token in range(start, end)] == tokens


def test_a_change_that_skips_loses_tokens() -> None:
    """The negative control of the test above: without the cut, a window's rest is lost."""
    order = SourceOrder(seed=1, name="web", tokens=2_001, chunk=40, window=5)
    cut = order.change_length(order.advance(Position(), 4, 20), 4, 8)
    for start, lost in ((cut, 0), (replace(cut, cuts=()), 30 * 4)):
        rows = order.end_row(0, 8, start.cuts) - start.row
        assert 20 * 4 + len(served(order, start, 8, rows)) == 2_000 - lost


@given(changed(), st.data())
@settings(max_examples=80, deadline=None)
def test_rows_with_equals_a_search_over_an_epoch(case: Changed, data: st.DataObject) -> None:
    order, position, length = case.order, case.position, case.length
    num_spans = data.draw(st.integers(0, 3))
    starts = [data.draw(st.integers(0, order.tokens - 1)) for _ in range(num_spans)]
    ends = [
        data.draw(st.integers(start, min(order.tokens, start + 3 * length))) for start in starts
    ]
    draws = np.arange(order.end_row(position.epoch, length, position.cuts) - position.row)
    tokens = [
        set(served(order, replace(position, row=position.row + row), length, 1))
        for row in draws.tolist()
    ]
    searched = [
        (span, row)
        for span, (start, end) in enumerate(zip(starts, ends, strict=True))
        for row, row_tokens in enumerate(tokens)
        if row_tokens & set(range(start, end))
    ]
    spans, rows = order.find_rows(
        position, length, np.array(starts, np.int64), np.array(ends, np.int64)
    )
    pairs = zip(spans.tolist(), (rows - position.row).tolist(), strict=True)
    assert [pair for pair in pairs if pair[1] >= 0] == searched


@given(changed(), st.data())
@settings(max_examples=150, deadline=None)
def test_taken_equals_a_walk_over_the_rows(case: Changed, data: st.DataObject) -> None:
    order, position, length = case.order, case.position, case.length
    rows = order.end_row(position.epoch, length, position.cuts) - position.row
    if not order.end_row(position.epoch + 1, length):
        return  # a source without a row of this length is never drawn
    draws = data.draw(st.integers(0, 2 * rows))
    epochs, _, _ = locate(order, position, length, np.arange(draws))
    tokens = np.array(served(order, position, length, draws), np.int64).reshape(draws, length)
    walked = {epoch: sorted(tokens[epochs == epoch].ravel().tolist()) for epoch in epochs.tolist()}
    taken = {
        epoch: [token for start, end in spans.tolist() for token in range(start, end)]
        for epoch, spans in order.served_spans(position, length, draws)
    }
    assert {epoch: tokens for epoch, tokens in taken.items() if tokens} == walked
