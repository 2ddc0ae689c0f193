from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.trainer.loop.guard import Guard

LOOKS_OUT = Guard(spike="skip", spike_bound=5.0, spike_window=20)
losses = st.lists(st.floats(1.0, 9.0), min_size=20, max_size=20)


def test_a_spike_exceeds_the_recent_losses() -> None:
    steady = [2.0 + 0.01 * (n % 3) for n in range(20)]
    assert LOOKS_OUT.is_spike(steady, 2.5)
    assert not LOOKS_OUT.is_spike(steady, 2.05)
    assert not LOOKS_OUT.is_spike(steady, 0.5), "a fall is none"
    assert not LOOKS_OUT.is_spike(steady, math.nan), "that is another matter"


def test_equal_losses_do_not_make_the_next_a_spike() -> None:
    assert not LOOKS_OUT.is_spike([2.0] * 20, 2.0 + 1e-9)


def test_too_few_losses_set_no_limit() -> None:
    assert LOOKS_OUT.limit([2.0] * 4) == math.inf
    assert LOOKS_OUT.limit([2.0] * 5) < 2.1


@given(losses, st.integers(0, 19))
def test_an_outlier_hardly_moves_the_limit(history: list[float], place: int) -> None:
    """A mean and its deviation would move far."""
    spiked = [*history[:place], 1e6, *history[place + 1 :]]
    assert LOOKS_OUT.limit(spiked) < 9.0 + 5.0 * 1.4826 * 9.0


@given(losses)
def test_spike_detection_is_off_by_default(history: list[float]) -> None:
    assert not Guard().is_spike(history, 1e9)
    assert Guard().remember(history, 1.0) == ()


def test_the_guard_keeps_a_window_of_losses() -> None:
    kept: tuple[float, ...] = ()
    for loss in range(30):
        kept = LOOKS_OUT.remember(kept, float(loss))
    assert kept == tuple(map(float, range(10, 30)))


@pytest.mark.parametrize("which", ["not_finite", "spike"])
def test_rollback_is_known_from_the_actions(which: str) -> None:
    assert Guard(**{which: "rollback"}).may_roll_back  # type: ignore[arg-type]
    assert not Guard(**{which: "skip"}).may_roll_back  # type: ignore[arg-type]


ENGINES = [
    *(f"deepspeed-{stage}-fp32" for stage in range(4)),
    *(f"deepspeed-{stage}-bf16" for stage in (1, 2, 3)),
    "fsdp2-0-fp32",
]


@pytest.mark.parametrize(
    ("faulty", "layouts"),
    [
        pytest.param(1, ENGINES[-2:], marks=pytest.mark.slow),
        pytest.param(1, ENGINES, marks=pytest.mark.long),
        pytest.param(None, ENGINES, marks=pytest.mark.long),
    ],
)
def test_a_skipped_step_leaves_no_trace_in_any_engine(
    in_processes: Any, faulty: int | None, layouts: list[str]
) -> None:
    """Two ranks, both or one with a NaN, or asking to discard the step: the next step is that of a
    run without them."""
    result = in_processes(2, "left_out", layouts=layouts, faulty=faulty)
    assert list(result) == layouts
    for layout, (applied, unchanged, counted, continues) in result.items():
        assert not applied, layout
        assert unchanged and counted and continues, layout
