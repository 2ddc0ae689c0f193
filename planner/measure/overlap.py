"""Slow-down of computation and communication while both run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .clock import Clock, dtype_of
from .collectives import Group, World

WORST = 10.0
"""Greatest slow-down that is reported: beyond it, one waits for the other."""


def slowdowns(alone: tuple[float, float], ends: tuple[float, float]) -> tuple[float, float]:
    """Return how much longer the two take while both run.

    `alone` are their times alone, `ends` their ends after a common start. Until the first end both
    run; the rest of the second runs alone.
    """
    first = 0 if ends[0] <= ends[1] else 1
    second = 1 - first
    done = alone[second] - (ends[second] - ends[first])
    factors = [0.0, 0.0]
    factors[first] = ends[first] / alone[first]
    factors[second] = ends[first] / done if done > 0 else WORST
    compute, communication = (min(max(factor, 1.0), WORST) for factor in factors)
    return compute, communication


def measure(
    world: World, group: Group, size: int, side: int, precision: str, clock: Clock
) -> tuple[float, float]:
    """Return the slow-downs of matrix products of `side` and of all-reduces of `size` bytes.

    Collective: every rank of the world calls it.
    """
    a, b = torch.randn(2, side, side, device=world.device).to(dtype_of(precision))
    tensor = torch.ones(size // 4, device=world.device)

    def compute(runs: int) -> None:
        for _ in range(runs):
            torch.mm(a, b)

    def communicate(runs: int) -> list[Any]:
        if group.idle:
            return []
        return [dist.all_reduce(tensor, group=group.handle, async_op=True) for _ in range(runs)]

    def wait(runs: int) -> None:
        for each in communicate(runs):
            each.wait()

    def alone(run: Callable[[int], None]) -> tuple[int, float]:
        """Return a number of runs that fills the budget, and their time."""
        run(1)
        once = world.slowest(clock.once(lambda: run(1)))
        runs = max(1, round(clock.budget / once))
        world.slowest(0.0)
        return runs, world.slowest(clock.once(lambda: run(runs)))

    products, computing = alone(compute)
    messages, communicating = alone(wait)
    trials = []
    for _ in range(3):
        world.slowest(0.0)
        ends = _together(lambda: compute(products), lambda: communicate(messages), world.device)
        ends = world.slowest(ends[0]), world.slowest(ends[1])
        trials.append(slowdowns((computing, communicating), ends))
    first, second = (sorted(each)[1] for each in zip(*trials, strict=True))
    return first, second


def _together(
    compute: Callable[[], None], communicate: Callable[[], list[Any]], device: torch.device
) -> tuple[float, float]:
    """Start both; return the seconds until the end of each."""
    if device.type == "cuda":
        return _on_streams(compute, communicate)
    begin = time.perf_counter()
    ended: list[float] = []
    works = communicate()

    def watch() -> None:
        for each in works:
            each.wait()
        ended.append(time.perf_counter() - begin)

    watcher = threading.Thread(target=watch)
    watcher.start()
    compute()
    computed = time.perf_counter() - begin
    watcher.join()
    return computed, ended[0]


def _on_streams(
    compute: Callable[[], None], communicate: Callable[[], list[Any]]
) -> tuple[float, float]:
    begin, computed, communicated = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    begin.record()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for each in communicate():
            each.wait()
        communicated.record()
    compute()
    computed.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(computed) / 1e3, begin.elapsed_time(communicated) / 1e3
