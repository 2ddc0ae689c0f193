"""Shares as exact fractions, and as integer weights of a plan."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.dataplane.order.plan import Phase
from headrace.mixtures.mixture_file.mixture import PhaseSpec, exact_fraction
from headrace.mixtures.planning.shares import (
    average_shares,
    drawn_shares,
    fit_tables,
    make_line,
    phase_shares,
    split_stretches,
)

F = Fraction


def test_exact_fraction_is_the_decimal_as_written():
    assert exact_fraction(0.1) == F(1, 10)
    assert exact_fraction(1e-7) == F(1, 10**7)
    assert sum(map(exact_fraction, (0.1, 0.2, 0.7))) == 1  # not so for floats


def test_a_replayed_phase_is_replaced_by_its_sources():
    spec = PhaseSpec(weights={"stable": 0.6, "math": {"from": 0.0, "to": 0.4}, "web": 0.2})
    first, last = phase_shares(spec, ("web", "math"), {"stable": (F(3, 4), F(1, 4))})
    # check.py reports shares that do not sum to 1; here they are scaled.
    assert first == (F(65, 80), F(15, 80))
    assert last == (F(65, 120), F(55, 120))
    assert average_shares((F(1), F(0)), (F(1, 2), F(1, 2))) == (F(3, 4), F(1, 4))


def as_phase(rows, parts):
    return Phase(
        name="p",
        first_row=0,
        first_step=0,
        first_token=0,
        rows=rows,
        seq_len=1,
        batch_rows=1,
        stretches=parts,
    )


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=12).filter(any), st.integers(1, 10**12))
def test_weights_reproduce_decimal_shares_exactly(parts, rows):
    shares = tuple(F(part, sum(parts)) for part in parts)
    (only,) = split_stretches(rows, shares, shares)
    assert [F(weight, sum(only.weights)) for weight in only.weights] == list(shares)


corners = st.lists(st.integers(0, 100), min_size=3, max_size=6).filter(any)


@given(corners, corners, st.integers(1, 11).flatmap(lambda digits: st.integers(1, 10**digits)))
@settings(max_examples=100, deadline=None)
def test_a_ramp_follows_its_line_and_ends_within_a_row(first_weights, last_weights, rows):
    size = min(len(first_weights), len(last_weights))
    first_weights, last_weights = first_weights[:size], last_weights[:size]
    if not any(first_weights) or not any(last_weights):
        return
    first = tuple(F(part, sum(first_weights)) for part in first_weights)
    last = tuple(F(part, sum(last_weights)) for part in last_weights)
    parts = split_stretches(rows, first, last)
    assert sum(part.rows for part in parts) == rows
    assert all(part.rows > 0 for part in parts)
    drawn = drawn_shares(as_phase(rows, parts))
    assert sum(drawn) == 1
    taken = [F(0)] * size
    start = 0
    for part in parts:
        total = sum(part.weights)
        start += part.rows
        for index, weight in enumerate(part.weights):
            taken[index] += F(weight * part.rows, total)
            asked = first[index] * start + (last[index] - first[index]) * F(start**2, 2 * rows)
            # On the way, off by at most the rounding of the table over one stretch.
            assert abs(taken[index] - asked) <= 1 + F(size * (math.ceil(rows / 128) + 1), 1024)
    for index in range(size):
        assert abs(drawn[index] - average_shares(first, last)[index]) * rows < 1


def test_a_line_keeps_shares_of_any_decimals():
    first = (F(1, 3), F(2, 3) - F(1, 10**7), F(1, 10**7))
    last = (F(1), F(0), F(0))
    assert fit_tables(last, last) and not fit_tables(first, last)
    only = make_line(10**9, first, last)
    assert [F(weight, sum(only.weights)) for weight in only.weights] == list(first)
    assert [F(weight, sum(only.weights)) for weight in only.to] == list(last)
    assert drawn_shares(as_phase(10**9, (only,))) == average_shares(first, last)
    assert sum(rows for rows, _ in only.stairs) == 10**9
    mean = [sum(rows * shares[index] for rows, shares in only.stairs) / 1e9 for index in range(3)]
    assert mean == pytest.approx([float(share) for share in average_shares(first, last)])
    assert make_line(7, last, last).to == ()
