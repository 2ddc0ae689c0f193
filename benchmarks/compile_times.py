"""Seconds until the first step of a compiled model, cold and warm, and of a step after it.

    python -m benchmarks.compile_times

The model and the rows are those of trainer_step: 9 blocks of 3 kinds, each compiled once. Both
engines compile the same blocks, so one is measured. A cold start has an empty cache of generated
code (TORCHINDUCTOR_CACHE_DIR), a warm start has that of the cold one. Each start is a process of
its own; the peer is the same engine without compilation. The seconds are those of the clock: torch
generates code in several processes.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from statistics import median

from .trainer_step import stepper

ENGINE, STEPS = "fsdp2", 4


def serve(cache: str | None, parent: Connection) -> None:
    """Send the seconds of the first step and the median of the next."""
    if cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    _, step = stepper(ENGINE, compiled=cache is not None)
    taken = []
    for _ in range(1 + STEPS):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    parent.send((taken[0], median(taken[1:])))


def measured(cache: str | None) -> tuple[float, float]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(cache, theirs))
    process.start()
    theirs.close()  # so that recv() fails if the process ends
    first, later = ours.recv()
    process.join()
    return first, later


def main() -> None:
    first, plain = measured(None)
    with tempfile.TemporaryDirectory() as cache:
        cold, _ = measured(cache)
        warm, compiled = measured(cache)
    print(
        f"first step: {cold:.1f} s cold and {warm:.1f} s warm, {first:.1f} s without compilation; "
        f"a warm start waits {(warm - first) / max(cold - first, 1e-9):.0%} as long as a cold one"
    )
    print(f"later steps: {compiled:.2f} s, {compiled / plain:.2f} of {plain:.2f} s without it")


if __name__ == "__main__":
    main()
