from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataplane.order.epochs.remainder import Remainder, locate_rows, merge_spans


@st.composite
def remainders(draw: st.DrawFn) -> Remainder:
    edges = sorted(draw(st.sets(st.integers(0, 80), max_size=12)))
    spans = np.array(edges[: len(edges) // 2 * 2], np.int64).reshape(-1, 2)
    return Remainder(spans)


def rows_with(remainder: Remainder, length: int, token: int) -> list[int]:
    _, rows = remainder.find_rows(length, np.array([token]), np.array([token + 1]))
    return rows.tolist()


def tokens_of(spans: list[list[int]]) -> list[int]:
    return [token for start, end in spans for token in range(start, end)]


@given(remainders(), st.integers(1, 12))
@settings(max_examples=120, deadline=None)
def test_rows_and_what_they_leave_are_all_tokens(remainder: Remainder, length: int) -> None:
    rows = remainder.num_rows(length)
    firsts, pieces = locate_rows([remainder], length, np.zeros(rows, np.int64), np.arange(rows))
    served: list[int] = []
    for row, first in enumerate(firsts.tolist()):
        tokens = tokens_of(pieces[row].tolist() if row in pieces else [[first, first + length]])
        assert tokens[0] == first and len(tokens) == length
        assert row not in pieces or len(pieces[row]) > 1
        served += tokens
        for token in (tokens[0], tokens[-1]):
            assert row in rows_with(remainder, length, token)
    unused = tokens_of(remainder.unserved_spans(length).tolist())
    assert sorted(served + unused) == tokens_of(remainder.spans.tolist())
    assert len(unused) < length
    assert all(not rows_with(remainder, length, token) for token in unused)


@given(st.lists(remainders(), min_size=1, max_size=4), st.integers(1, 12), st.randoms())
@settings(max_examples=60, deadline=None)
def test_rows_of_several_remainders_equal_those_of_each(
    several: list[Remainder], length: int, random: Random
) -> None:
    pairs = [
        (owner, row)
        for owner, remainder in enumerate(several)
        for row in range(remainder.num_rows(length))
    ]
    random.shuffle(pairs)
    owners, rows = np.array(pairs, np.int64).reshape(-1, 2).T
    firsts, pieces = locate_rows(several, length, owners, rows)
    for place, (owner, row) in enumerate(pairs):
        first, parts = locate_rows([several[owner]], length, np.array([0]), np.array([row]))
        assert first[0] == firsts[place]
        assert [part.tolist() for part in parts.values()] == (
            [pieces[place].tolist()] if place in pieces else []
        )


def test_spans_that_touch_are_joined() -> None:
    assert merge_spans(np.array([[4, 6], [0, 2], [6, 9], [2, 3]])).tolist() == [[0, 3], [4, 9]]
    assert merge_spans(np.empty((0, 2), np.int64)).shape == (0, 2)
