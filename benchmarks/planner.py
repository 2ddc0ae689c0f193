"""Planner: CPU seconds and memory of searches for 2,048 GPUs, beside their limits.

    python -m benchmarks.planner [MODEL LENGTH BATCH]

Each search runs in a process of its own, which counts its imports; traces are made anew for each
model and length. A reference loop runs before and after each search: on a busy machine both take
longer. The limits are 10 CPU seconds where the loop takes LOOP_SECONDS, and 800 MiB. Kernels
without a published rate are priced by their bytes and operations (--roofline).
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

import yaml

from headrace.console.config import build
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.planner.hardware import Hardware
from headrace.planner.search.make import PlanRequest, make_plans, uniform_phase
from headrace.trainer.run.config import RunConfig

GPUS, SECONDS, MEMORY = 2048, 10.0, 800 << 20
LOOP_SECONDS = 0.12
"""CPU seconds of the reference loop on an idle core of the machine that the limit is for (0.11 to
0.13 with two cores of an Intel Xeon)."""
MODELS = ("llama2-70b", "zamba2-7b", "evo2-40b-8k", "qwen3-235b-a22b")
PHASES = ((4096, 8 << 20), (8192, 4 << 20), (32768, 16 << 20))
"""Tokens of a row, and tokens of a step."""
PUBLISHED = Path(__file__).with_name("published_models.yaml")


def time_loop() -> float:
    """Return the CPU seconds of a loop in plain Python."""
    start = time.process_time()
    total = 0
    for number in range(4_000_000):
        total += number & 7
    return time.process_time() - start


def load_model(name: str) -> ModelConfig:
    """Return a shipped model, or one of the published runs."""
    published = yaml.safe_load(PUBLISHED.read_text())
    if name in published:
        return build(ModelConfig, published[name], source=name)
    return load_model_config(name)


def search(name: str, length: int, batch: int) -> None:
    """Search in this process, and print what it took."""
    question = PlanRequest(
        model=load_model(name),
        run=replace(RunConfig(), precision="bf16"),
        hardware=Hardware.load("h100"),
        gpus=GPUS,
        phases=[uniform_phase(length, batch // length)],
        roofline=True,
    )
    before = time_loop()
    start = time.process_time() - before
    [phase] = make_plans(question).phases
    spent = time.process_time() - before
    loop = (before + time_loop()) / 2
    seconds = spent * LOOP_SECONDS / loop
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcome, best = phase.outcome, phase.best
    print(
        f"{name:<16}{length:>7,} tokens a row, {batch:>11,} a step: {spent:.1f} CPU s "
        f"({start:.1f} before the search), {spent / loop:.0f} loops of {loop:.2f} s, "
        f"{seconds / SECONDS:.2f} of the limit; {peak / 1024:.0f} MiB, "
        f"{peak * 1024 / MEMORY:.2f} of the limit; {outcome.grids:,} layouts, "
        f"{outcome.solved} divided; best {best.solution.price:.3g} s: {best.grid.name()}",
        flush=True,
    )


def main(*words: str) -> None:
    if words:
        search(words[0], int(words[1]), int(words[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (length, batch)) in enumerate(product(MODELS, PHASES)):
            environment = {**os.environ, "XDG_CACHE_HOME": f"{folder}/{number}"}
            command = [sys.executable, "-m", "benchmarks.planner", name, str(length), str(batch)]
            subprocess.run(command, env=environment, check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
