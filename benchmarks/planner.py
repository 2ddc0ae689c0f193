"""Planner: CPU seconds and memory of a search for 2,048 GPUs, beside the limits that it has.

    python -m benchmarks.planner [MODEL]

Each search runs in a process of its own. The limits are 15 CPU seconds for the process, with its
imports and with traces made anew, and 1 GiB of memory. Kernels without a published rate are priced
by their bytes and operations (--roofline).
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

from headrace.models.config.config import load_model_config
from headrace.planner.hardware import Hardware
from headrace.planner.search.make import PlanRequest, make_plans, uniform_phase
from headrace.trainer.run.config import RunConfig

GPUS, SECONDS, MEMORY = 2048, 15.0, 1 << 30
RUNS = (
    ("llama2-70b", 4096, 8 << 20),
    ("zamba2-7b", 4096, 8 << 20),
    ("evo2-40b-8k", 16384, 16 << 20),
    ("evo2-40b-1m", 1 << 20, 64 << 20),
)
"""Model, tokens of a row, and tokens of a step."""


def search(name: str, length: int, batch: int) -> None:
    """Search in this process, and print what it took."""
    question = PlanRequest(
        model=load_model_config(name),
        run=replace(RunConfig(), precision="bf16"),
        hardware=Hardware.load("h100"),
        gpus=GPUS,
        phases=[uniform_phase(length, batch // length)],
        roofline=True,
    )
    [own] = make_plans(question).phases
    spent = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"{name:<12} {length:>9,} tokens a row: {spent:.1f} CPU s, {spent / SECONDS:.2f} of the "
        f"limit; {peak / 2**20:.0f} MiB, {peak / MEMORY:.2f} of the limit; "
        f"{own.outcome.grids:,} layouts of {own.outcome.shapes:,} shapes, "
        f"{own.outcome.solved} divided; best {own.best.solution.price:.3g} s: "
        f"{own.best.grid.name()}",
        flush=True,
    )


def main(*names: str) -> None:
    if names:
        [run] = [run for run in RUNS if run[0] == names[0]]
        search(*run)
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, *_) in enumerate(RUNS):
            own = {**os.environ, "XDG_CACHE_HOME": f"{folder}/{number}"}
            subprocess.run([sys.executable, "-m", "benchmarks.planner", name], env=own, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
