"""Own times of ranks of which one is slow: a task for the ranks of a pool (see layouts.py).

Time is a number that the ranks share. It passes while the slow rank naps, and a nap ends when all
other ranks wait for the slow one, so the result does not depend on the machine.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from support.tasks.piped import place

from headrace.trainer.loop.compute_time import ComputeTimer, HostClock

PATIENCE = 60.0
"""Seconds after which a nap ends although not all ranks wait."""


class Shared:
    """The time, and whether each rank waits: numbers in a file that all ranks map."""

    def __init__(self, folder: Path) -> None:
        file = folder / "time"
        if dist.get_rank() == 0:
            file.write_bytes(bytes(8 * (1 + dist.get_world_size())))
        dist.barrier()
        self.file = file.open("r+b")
        self.numbers: Any = np.memmap(self.file, np.float64)

    @contextmanager
    def locked(self) -> Iterator[Any]:
        fcntl.flock(self.file, fcntl.LOCK_EX)
        try:
            yield self.numbers
        finally:
            fcntl.flock(self.file, fcntl.LOCK_UN)

    def nap(self) -> None:
        """Let a second pass while all other ranks wait."""
        peers = [1 + rank for rank in range(dist.get_world_size()) if rank != dist.get_rank()]
        late = time.monotonic() + PATIENCE
        while True:
            with self.locked() as numbers:
                if numbers[peers].all() or time.monotonic() > late:
                    numbers[0] += 1.0
                    return
            time.sleep(0.001)


class Clock(HostClock):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = shared

    def mark(self) -> float:
        return float(self.shared.numbers[0])


class Timed(ComputeTimer):
    """Says when this rank waits."""

    @contextmanager
    def exclude_wait(self, stream: Any = None) -> Iterator[None]:
        shared, slot = self.clock.shared, 1 + dist.get_rank()  # type: ignore[union-attr]
        if self.waiting:
            yield
            return
        wait = super().exclude_wait(stream)
        wait.__enter__()
        shared.numbers[slot] = 1.0
        yield
        with shared.locked() as numbers:
            numbers[slot] = 0.0
            wait.__exit__(None, None, None)


def compute_times(
    folder: Path, layouts: list[str], model: str = "tiny"
) -> dict[str, tuple[int, list[tuple[float, float]]]]:
    """Return, for each layout, the rank that naps for a second before its first block, and for
    each rank its compute time in a step and the time of the whole step."""
    work: Any = import_module("work")  # layouts.py, as the pool's ranks name it
    shared, result = Shared(folder), {}
    for number, layout in enumerate(layouts):
        slow = number % dist.get_world_size()
        parallel = place(layout, model)
        engine = work.make_engine(layout, parallel, model=model)
        work.train(engine, parallel, 0, 1)
        dist.barrier()
        if dist.get_rank() == slow:
            [first, *_] = engine.objective.model.blocks.values()
            first.register_forward_pre_hook(lambda *_: shared.nap())
        with Timed(Clock(shared)) as timed:
            work.train(engine, parallel, 1, 1)
            lap = timed.lap()
            pairs: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(pairs, (lap.seconds(), lap.end - lap.begin))
        result[layout] = slow, pairs
    return result
