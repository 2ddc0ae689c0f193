from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.loop.guard import Guard

LOOKS_OUT = Guard(spike="skip", bound=5.0, window=20)
losses = st.lists(st.floats(1.0, 9.0), min_size=20, max_size=20)


def test_a_spike_stands_out_from_what_was_before() -> None:
    steady = [2.0 + 0.01 * (n % 3) for n in range(20)]
    assert LOOKS_OUT.is_spike(steady, 2.5)
    assert not LOOKS_OUT.is_spike(steady, 2.05)
    assert not LOOKS_OUT.is_spike(steady, 0.5), "a fall is none"
    assert not LOOKS_OUT.is_spike(steady, math.nan), "that is another matter"


def test_equal_losses_do_not_make_the_next_a_spike() -> None:
    assert not LOOKS_OUT.is_spike([2.0] * 20, 2.0 + 1e-9)


def test_a_few_losses_say_nothing() -> None:
    assert LOOKS_OUT.limit([2.0] * 4) == math.inf
    assert LOOKS_OUT.limit([2.0] * 5) < 2.1


@given(losses, st.integers(0, 19))
def test_one_spike_among_them_hardly_moves_the_limit(found: list[float], place: int) -> None:
    """A mean and its deviation would be carried off by it."""
    spiked = [*found[:place], 1e6, *found[place + 1 :]]
    assert LOOKS_OUT.limit(spiked) < 9.0 + 5.0 * 1.4826 * 9.0


@given(losses)
def test_it_looks_out_only_where_it_is_asked(found: list[float]) -> None:
    assert not Guard().is_spike(found, 1e9)
    assert Guard().remember(found, 1.0) == ()


def test_it_remembers_a_window() -> None:
    kept: tuple[float, ...] = ()
    for loss in range(30):
        kept = LOOKS_OUT.remember(kept, float(loss))
    assert kept == tuple(map(float, range(10, 30)))


@pytest.mark.parametrize("which", ["not_finite", "spike"])
def test_whether_it_may_go_back(which: str) -> None:
    assert Guard(**{which: "rollback"}).may_roll_back  # type: ignore[arg-type]
    assert not Guard(**{which: "skip"}).may_roll_back  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_step_that_is_left_out_leaves_no_trace_in_any_engine(in_processes: Any) -> None:
    """What the loop does with a spike, on two processes: the next step is as if it had not been."""
    layouts = [*(f"deepspeed-{stage}-fp32" for stage in range(4)), "fsdp2-0-fp32"]
    found = in_processes(2, "left_out", layouts=[*layouts, "deepspeed-1-bf16", "deepspeed-3-bf16"])
    assert len(found) == 7
    for layout, (applied, same, counted, goes_on) in found.items():
        assert not applied, layout
        assert same and counted and goes_on, layout
