"""Values within a number of bytes; spans in two bytes; and the remainders that are kept so."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataplane.order.epochs import tokens
from headrace.dataplane.order.epochs.bounded import ENTRY_BYTES, BoundedCache
from headrace.dataplane.order.epochs.packed import MAX_STEP, PackedSpans
from headrace.dataplane.order.source_order import Draws, Position, SourceOrder


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(0, 900)), budget=st.integers(0, 5000))
def test_values_stay_within_their_bytes(sizes: list[int], budget: int) -> None:
    kept: BoundedCache[int, int] = BoundedCache(budget)
    for key, size in enumerate(sizes):
        kept.put(key, -key, size)
        held = [item for item in range(key + 1) if kept.get(item) is not None]
        assert kept.budget == budget - sum(sizes[item] + ENTRY_BYTES for item in held) >= 0
        assert all(kept.get(item) == -item for item in held)
        assert len(kept) == len(held)


def test_keys_that_take_turns_are_found_as_often_as_they_fit() -> None:
    """Dropping the key that was used longest ago would find none."""
    kept: BoundedCache[int, int] = BoundedCache(80 * ENTRY_BYTES)
    result = 0
    for turn in range(4000):
        key = turn % 100
        result += kept.get(key) is not None
        kept.put(key, key, 0)
    assert result > 2000


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(st.integers(1, 5 * MAX_STEP * 8), min_size=2, max_size=40),
    length=st.sampled_from([1, 8, 12]),
)
def test_packed_spans_are_the_spans(steps: list[int], length: int) -> None:
    spans = np.cumsum(steps)[: len(steps) // 2 * 2].reshape(-1, 2)
    packed = PackedSpans.pack(spans, length)
    assert packed.unpack().tolist() == spans.tolist()


def test_spans_of_whole_rows_take_two_bytes() -> None:
    spans = np.arange(8000).reshape(-1, 2) * 4096
    assert PackedSpans.pack(spans, 4096).nbytes < 2.1 * len(spans)
    assert PackedSpans.pack(spans[:0], 4096).unpack().shape == (0, 2)


@pytest.mark.parametrize("entries", [0, 3])
def test_the_room_for_remainders_changes_no_row(
    entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight sources, each cut twice, serve the rest of their epoch in turns and at random."""
    expected = served()
    kept: BoundedCache[object, object] = BoundedCache(entries * (ENTRY_BYTES + 60))
    monkeypatch.setattr(tokens, "REMAINDERS", kept)
    assert served() == expected
    assert kept.budget >= 0
    assert (len(kept) == 0) == (entries == 0)


def served() -> list[object]:
    orders = [
        SourceOrder(seed=3, name=f"s{number}", tokens=3000 + 17 * number, chunk=64, window=5)
        for number in range(8)
    ]
    starts = []
    for order in orders:
        position = order.advance(Position(), 8, 137)
        position = order.advance(order.change_length(position, 8, 16), 16, 43)
        starts.append(order.change_length(position, 16, 32))
    rest, every = Draws(orders, starts, 32), np.arange(len(orders))
    assert all(len(start.cuts) == 2 for start in starts)
    draws = np.arange(20, 45)
    rows: list[object] = []
    for turn in (draws, np.random.default_rng(0).permutation(draws)):
        for draw in turn.tolist():
            _, firsts, pieces = rest.locate(every, np.full(len(orders), draw))
            rows.append((firsts.tolist(), {row: spans.tolist() for row, spans in pieces.items()}))
    return rows
