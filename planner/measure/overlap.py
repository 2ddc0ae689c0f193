"""Slow-downs of computation and communication while both run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .clock import Clock, torch_dtype
from .collectives import RankGroup, World

MAX_SLOWDOWN = 10.0
"""Greatest reported slow-down: beyond it, computation and communication take turns."""


def compute_slowdowns(alone: tuple[float, float], ends: tuple[float, float]) -> tuple[float, float]:
    """Return how much longer computation and communication take while both run.

    `alone` has the seconds of both alone, `ends` the seconds from a common start. Both run until
    the first ends; the second then runs alone.
    """
    first = 0 if ends[0] <= ends[1] else 1
    second = 1 - first
    shared_work = alone[second] - (ends[second] - ends[first])
    factors = [0.0, 0.0]
    factors[first] = ends[first] / alone[first]
    factors[second] = ends[first] / shared_work if shared_work > 0 else MAX_SLOWDOWN
    compute, communication = (min(max(factor, 1.0), MAX_SLOWDOWN) for factor in factors)
    return compute, communication


def measure_slowdowns(
    world: World, group: RankGroup, size: int, side: int, precision: str, clock: Clock
) -> tuple[float, float]:
    """Measure matrix products [side, side] beside all-reduces with `size` bytes.

    Collective: all ranks in the world call it.
    """
    a, b = torch.randn(2, side, side, device=world.device).to(torch_dtype(precision))
    tensor = torch.ones(size // 4, device=world.device)

    def compute(runs: int) -> None:
        for _ in range(runs):
            torch.mm(a, b)

    def communicate(runs: int) -> list[Any]:
        if group.idle:
            return []
        return [dist.all_reduce(tensor, group=group.handle, async_op=True) for _ in range(runs)]

    def wait(runs: int) -> None:
        for message in communicate(runs):
            message.wait()

    def time_alone(run: Callable[[int], None]) -> tuple[int, float]:
        """Return a number of runs that fills the budget, and their seconds."""
        run(1)
        once = world.slowest(clock.once(lambda: run(1)))
        runs = max(1, round(clock.budget / once))
        world.slowest(0.0)
        return runs, world.slowest(clock.once(lambda: run(runs)))

    num_products, compute_seconds = time_alone(compute)
    num_messages, message_seconds = time_alone(wait)
    trials = []
    for _ in range(3):
        world.slowest(0.0)
        ends = _time_together(
            lambda: compute(num_products), lambda: communicate(num_messages), world.device
        )
        ends = world.slowest(ends[0]), world.slowest(ends[1])
        trials.append(compute_slowdowns((compute_seconds, message_seconds), ends))
    compute_slowdown, message_slowdown = (
        sorted(factors)[1] for factors in zip(*trials, strict=True)
    )
    return compute_slowdown, message_slowdown


def _time_together(
    compute: Callable[[], None], communicate: Callable[[], list[Any]], device: torch.device
) -> tuple[float, float]:
    """Start both; return the seconds until computation and communication end."""
    if device.type == "cuda":
        return _time_on_streams(compute, communicate)
    start = time.perf_counter()
    message_ends: list[float] = []
    messages = communicate()

    def watch() -> None:
        for message in messages:
            message.wait()
        message_ends.append(time.perf_counter() - start)

    watcher = threading.Thread(target=watch)
    watcher.start()
    compute()
    compute_end = time.perf_counter() - start
    watcher.join()
    return compute_end, message_ends[0]


def _time_on_streams(
    compute: Callable[[], None], communicate: Callable[[], list[Any]]
) -> tuple[float, float]:
    start, compute_end, message_end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    start.record()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for message in communicate():
            message.wait()
        message_end.record()
    compute()
    compute_end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(compute_end) / 1e3, start.elapsed_time(message_end) / 1e3
