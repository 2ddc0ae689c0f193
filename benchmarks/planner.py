"""Planner: CPU seconds and memory of a search for 2,048 GPUs, beside the limits that it has.

    python -m benchmarks.planner

The limits are 15 CPU seconds for each search with its trace, which is made anew, and 1 GiB for the
process. Kernels without a published rate are priced by their bytes and operations (--roofline).
"""

from __future__ import annotations

import os
import resource
import tempfile
import time
from dataclasses import replace

from headrace.models.config import load_model_config
from headrace.trainer.costs.hardware import Hardware
from headrace.trainer.costs.planner.make import Question, make_plans, uniform_phase
from headrace.trainer.run.config import RunConfig

GPUS, SECONDS, MEMORY = 2048, 15.0, 1 << 30
RUNS = (
    ("llama2-70b", 4096, 8 << 20),
    ("zamba2-7b", 4096, 8 << 20),
    ("evo2-40b-8k", 16384, 16 << 20),
    ("evo2-40b-1m", 1 << 20, 64 << 20),
)
"""Model, tokens of a row, and tokens of a step."""


def main() -> None:
    hardware = Hardware.load("h100")
    run = replace(RunConfig(), precision="bf16")
    for name, length, batch in RUNS:
        question = Question(
            model=load_model_config(name),
            run=run,
            hardware=hardware,
            gpus=GPUS,
            phases=[uniform_phase(length, batch // length)],
            roofline=True,
        )
        began = time.process_time()
        plans = make_plans(question)
        spent = time.process_time() - began
        [own] = plans.phases
        print(
            f"{name:<12} {length:>9,} tokens a row: {spent:.1f} CPU s, {spent / SECONDS:.2f} of "
            f"the limit; {own.outcome.grids:,} layouts of {own.outcome.shapes:,} shapes, "
            f"{own.outcome.solved} divided; best {own.best.solution.price:.3g} s: "
            f"{own.best.grid.name()}",
            flush=True,
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory  {peak / 2**20:.0f} MiB, {peak / MEMORY:.2f} of the limit")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        main()
