"""Seconds until the first step of a compiled model, cold and warm, and of a step after it.

    python -m benchmarks.compile_times

The model has two blocks of each of three kinds (Hyena-SE, Mamba-2, attention, each with a gated
MLP), and each kind is compiled once. It is small, because the time to compile a block does not
depend on its width: on a CPU, the steps of a larger one would take the time instead. A cold start
has an empty cache of generated code (TORCHINDUCTOR_CACHE_DIR), a warm start has that of the cold
one. Each start is a process of its own; the peer is the same engine without compilation. The
seconds are those of the clock: torch generates code in several processes.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from multiprocessing.connection import Connection
from statistics import median

from .trainer_step import ENGINES, stepper

STEPS = 4
WIDTH, REPEATS, LENGTH = 320, 2, 64


def serve(engine: str, cache: str | None, parent: Connection) -> None:
    """Send the seconds of the first step and the median of the next."""
    if cache is not None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
    compiled = cache is not None
    _, step = stepper(engine, width=WIDTH, repeats=REPEATS, length=LENGTH, compiled=compiled)
    taken = []
    for _ in range(1 + STEPS):
        began = time.perf_counter()
        step()
        taken.append(time.perf_counter() - began)
    parent.send((taken[0], median(taken[1:])))


def measured(engine: str, cache: str | None) -> tuple[float, float]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=serve, args=(engine, cache, theirs))
    process.start()
    theirs.close()  # so that recv() fails if the process ends
    first, later = ours.recv()
    process.join()
    return first, later


def main() -> None:
    for engine in ENGINES:
        first, plain = measured(engine, None)
        with tempfile.TemporaryDirectory() as cache:
            cold, _ = measured(engine, cache)
            warm, compiled = measured(engine, cache)
        waits = (warm - first) / max(cold - first, 1e-9)
        print(
            f"{engine}, first step: {cold:.1f} s cold and {warm:.1f} s warm, {first:.1f} s without "
            f"compilation; a warm start waits {waits:.0%} as long as a cold one",
            flush=True,
        )
        print(
            f"{engine}, later steps: {1e3 * compiled:.0f} ms, {compiled / plain:.2f} of "
            f"{1e3 * plain:.0f} ms without it",
            flush=True,
        )


if __name__ == "__main__":
    main()
