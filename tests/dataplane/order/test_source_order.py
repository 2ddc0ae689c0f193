from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataplane.order.source_order import Position, Rest, SourceOrder, joined


@dataclass
class Case:
    order: SourceOrder
    length: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    length = draw(st.sampled_from([1, 2, 3, 8]))
    chunk = length * 4 * draw(st.integers(1, 5))
    window = draw(st.integers(1, 5))
    tokens = draw(st.integers(length + 1, chunk * window * 5))
    seed = draw(st.integers(0, 99))
    order = SourceOrder(seed=seed, name="web", tokens=tokens, chunk=chunk, window=window)
    return Case(order, length)


def served(order: SourceOrder, start: Position, length: int, rows: int) -> list[int]:
    """Return the tokens of the first `rows` rows in one list."""
    _, firsts = order.offsets(start, length, np.arange(rows))
    return (firsts[:, None] + np.arange(length)).ravel().tolist()


@given(cases())
@settings(max_examples=150, deadline=None)
def test_an_epoch_serves_each_token_once_except_less_than_a_row(case: Case) -> None:
    order, length = case.order, case.length
    rows = order.rows(0, length)
    epochs, _ = order.offsets(Position(), length, np.arange(2 * rows))
    assert epochs.tolist() == [0] * rows + [1] * rows
    tokens = served(order, Position(), length, rows)
    assert len(set(tokens)) == len(tokens)
    assert max(tokens) <= order.tokens - 2  # the last token is a target only
    assert order.tokens - 1 - len(tokens) < length


@given(cases())
@settings(max_examples=60, deadline=None)
def test_epochs_differ(case: Case) -> None:
    order, length = case.order, case.length
    rows = order.rows(0, length)
    _, firsts = order.offsets(Position(), length, np.arange(3 * rows))
    if rows > 12:
        orders = {tuple(part) for part in firsts.reshape(3, rows).tolist()}
        assert len(orders) == 3


@given(cases())
@settings(max_examples=60, deadline=None)
def test_a_window_holds_at_most_its_chunks(case: Case) -> None:
    """Locality bounds the cache."""
    order, length = case.order, case.length
    in_window = order.window * (order.chunk // length)
    rows = order.rows(0, length)
    _, firsts = order.offsets(Position(), length, np.arange(rows))
    for first in range(0, rows, in_window):
        chunks = set((firsts[first : first + in_window] // order.chunk).tolist())
        assert len(chunks) <= order.window + 1  # and a tail


@given(cases(), st.data())
@settings(max_examples=100, deadline=None)
def test_rows_of_another_length_start_at_the_next_window(case: Case, data: st.DataObject) -> None:
    order, length = case.order, case.length
    rows = order.rows(0, length)
    drawn = data.draw(st.integers(0, rows - 1))
    longer = length * data.draw(st.sampled_from([1, 2, 4]))
    before = served(order, Position(), length, drawn)
    here = order.advance(Position(), length, drawn)
    there = order.next_window(here, length)
    in_window = order.window * (order.chunk // length)
    if there.epoch == here.epoch:
        assert there.row - here.row < in_window
        start = order.convert(there, length, longer)
        after = served(order, start, longer, order.rows(0, longer) - start.row)
        assert not set(before) & set(after)
        assert len(set(after)) == len(after)


@given(cases(), st.data())
@settings(max_examples=150, deadline=None)
def test_a_continuation_serves_the_rest_of_an_epoch_once(case: Case, data: st.DataObject) -> None:
    order, length = case.order, case.length
    drawn = data.draw(st.integers(0, order.rows(0, length) - 1))
    grown = data.draw(st.sampled_from([0, 1, 50, 300]))
    times = data.draw(st.integers(1, 3))
    here = order.advance(Position(), length, drawn)
    child = SourceOrder(
        seed=order.seed,
        name=order.name,
        tokens=order.tokens + grown,
        chunk=order.chunk * times,
        window=order.window,
        rest=Rest(order=order, position=here, length=length),
    )
    start = Position(epoch=here.epoch)
    rows = child.rows(here.epoch, length)
    before = served(order, Position(), length, drawn)
    after = served(child, start, length, rows)
    assert len(set(after)) == len(after)
    assert not set(before) & set(after)
    assert not after or max(after) <= child.tokens - 2
    if times == 1 and not grown:  # only the rest of a started window is lost
        in_window = order.window * (order.chunk // length)
        begun = -(-drawn // in_window) * in_window - drawn
        assert rows >= order.rows(0, length) - drawn - begun - order.window * order.chunk // length
    # The next epoch holds all tokens again.
    assert child.rows(here.epoch + 1, length) == (child.tokens - 1) // length


def test_a_row_does_not_depend_on_the_rows_located_with_it() -> None:
    order = SourceOrder(seed=1, name="a", tokens=10**12, chunk=1 << 20, window=64)
    draws = np.array([0, 5, 10**7, 10**8 - 1, 3 * 10**8])
    epochs, firsts = order.offsets(Position(), 4096, draws)
    for number, draw in enumerate(draws.tolist()):
        epoch, first = order.offsets(Position(row=draw), 4096, np.array([0]))
        assert (epoch[0], first[0]) == (epochs[number], firsts[number])


def test_spans_that_touch_are_joined() -> None:
    assert joined(np.array([[4, 6], [0, 2], [6, 9], [2, 3]])).tolist() == [[0, 3], [4, 9]]
    assert joined(np.empty((0, 2), np.int64)).shape == (0, 2)


@given(cases(), st.data())
@settings(max_examples=150, deadline=None)
def test_rows_with_equals_a_search_over_an_epoch(case: Case, data: st.DataObject) -> None:
    order, length = case.order, case.length
    epoch = data.draw(st.integers(0, 2))
    if data.draw(st.booleans()):  # an order that continues another
        drawn = data.draw(st.integers(0, order.rows(0, length)))
        rest = Rest(order=order, position=order.advance(Position(), length, drawn), length=length)
        grown = data.draw(st.sampled_from([0, 1, 30]))
        order = replace(order, chunk=length * 2, tokens=order.tokens + grown, rest=rest)
    start = data.draw(st.integers(0, order.tokens - 1))
    end = data.draw(st.integers(start, min(order.tokens, start + 3 * length)))
    rows = np.arange(order.rows(epoch, length))
    _, firsts = order.offsets(Position(epoch=epoch), length, rows)
    searched = rows[(firsts < end) & (firsts + length > start) & (start < end)]
    assert order.rows_with(epoch, length, start, end).tolist() == searched.tolist()


@given(cases(), st.data())
@settings(max_examples=150, deadline=None)
def test_taken_equals_a_walk_over_the_rows(case: Case, data: st.DataObject) -> None:
    order, length = case.order, case.length
    rows = order.rows(0, length)
    position = Position(epoch=data.draw(st.integers(0, 1)), row=data.draw(st.integers(0, rows - 1)))
    draws = data.draw(st.integers(0, 2 * rows))
    epochs, firsts = order.offsets(position, length, np.arange(draws))
    walked: dict[int, set[int]] = {}
    for epoch, first in zip(epochs.tolist(), firsts.tolist(), strict=True):
        walked.setdefault(epoch, set()).update(range(first, first + length))
    taken = {
        epoch: [token for start, end in spans.tolist() for token in range(start, end)]
        for epoch, spans in order.taken(position, length, draws)
    }
    assert taken == {epoch: sorted(tokens) for epoch, tokens in walked.items()}
