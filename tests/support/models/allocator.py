"""Levels of memory by the events of torch's allocator on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from torch.profiler import ProfilerActivity, profile, record_function

TURN = "headrace: turn"


@dataclass(frozen=True)
class Levels:
    """Bytes above the level at the start."""

    turn: int
    """At the mark `turn`, if the function set it."""
    peak: int


def turn() -> None:
    """Mark a moment."""
    with record_function(TURN):
        pass


def levels(run: Callable[[], object]) -> Levels:
    """Run a function and read the allocator's events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    marks = [event.start_ns() for event in events if event.name() == TURN]
    sizes = sorted(
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    )
    all_levels = [0, *accumulate(size for _, size in sizes)]
    before = sum(at < min(marks, default=0) for at, _ in sizes)
    return Levels(all_levels[before], max(all_levels))
