"""Step time of pipelines on 4 processes, compared with the simulator's prediction.

    python -m benchmarks.pipeline [--model hybrid] [--micro-batches 8]

The prediction uses measured times: each chunk's forward and backward pass alone, on one process.
With fewer than 4 free cores the ranks share them, and the ratio says that, not the schedule: the
benchmark then counts CPU time as well. The last line compares the executor on one rank with the
plain loop that it replaces: forward, backward, for each micro-batch.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from headrace.models.config import ModelConfig, load_model_config
from headrace.models.documents import Documents
from headrace.models.model import Model
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.objective import Objective
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.stages import cuts_of
from headrace.trainer.loop.execute import execute
from headrace.trainer.pipeline.cuts import Cuts, even
from headrace.trainer.pipeline.simulate import simulate

from . import _ranks
from .messages import Batch

RANKS, LENGTH, RUNS = 4, 256, 5
OVERRIDES = ("pattern='[mamba, attention] * 8'", "vocab_size=4096")
"""Sixteen layers, and a head that costs as much as several of them."""


def config_of(model: str) -> ModelConfig:
    return load_model_config(model, OVERRIDES)


def rows(number: int, vocabulary: int) -> list[Batch]:
    numbers = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, vocabulary, (number, 1, LENGTH), generator=numbers)
    ends = torch.tensor([0, LENGTH])
    return [Batch(each, each, torch.ones(1, LENGTH), ends) for each in tokens]


def seconds(act: Callable[[], object]) -> float:
    """Return the median time of a call, after one that warms up."""
    taken = []
    for _ in range(RUNS + 1):
        began = time.perf_counter()
        act()
        taken.append(time.perf_counter() - began)
    return median(taken[1:])


def step_time(model: str, layout: LayoutConfig, micro_batches: int) -> float:
    """Return the time of the passes of a step, on the slowest rank."""
    config = config_of(model)
    engine, parallel = _ranks.build(config, Fsdp2Config(), layout, LENGTH, "fp32")
    batches, orders = rows(micro_batches, config.vocab_size), parallel.pipe.orders(micro_batches)

    def step() -> None:
        dist.barrier()
        execute(orders, batches, engine, parallel, float(micro_batches * LENGTH))
        dist.barrier()
        engine.discard()

    return seconds(step)


def chunk_times(config: ModelConfig, cuts: Cuts) -> dict[Any, list[float]]:
    """Return the times of a forward and a backward pass of each chunk, on one process."""
    model = Model(config)
    model.init_weights(0)
    model.keep(cuts, range(len(cuts) + 1))
    objective = Objective(model)
    [batch] = rows(1, config.vocab_size)
    documents = Documents.from_cu_seqlens(batch.cu_seqlens, (1, LENGTH))
    times: dict[Any, list[float]] = {"forward": [], "backward": []}
    stream: tuple[torch.Tensor, ...] = ()
    for chunk in range(len(cuts) + 1):
        forward, backward = [], []
        for _ in range(RUNS + 1):
            leaves = tuple(tensor.detach().requires_grad_() for tensor in stream)
            began = time.perf_counter()
            sums = objective(*batch[:3], documents, chunk, leaves)
            middle = time.perf_counter()
            last = sums.stream[0].sum() if sums.stream else 0.0
            (sums.total + last).backward()
            forward.append(middle - began)
            backward.append(time.perf_counter() - middle)
        times["forward"].append(median(forward[1:]))
        times["backward"].append(median(backward[1:]))
        stream = sums.stream
    return times


def overhead(model: str, micro_batches: int) -> tuple[float, float]:
    """Return the times of the executor and of the plain loop on one rank, taken in turn."""
    config = config_of(model)
    engine, parallel = _ranks.build(config, Fsdp2Config(), LayoutConfig(), LENGTH, "fp32")
    batches, orders = rows(micro_batches, config.vocab_size), parallel.pipe.orders(micro_batches)

    def plain() -> None:
        for number, batch in enumerate(batches):
            documents = Documents.from_cu_seqlens(batch.cu_seqlens, (1, LENGTH))
            sums = engine(*batch[:3], documents)
            engine.backward(sums.total / 7.0, last=number == micro_batches - 1)
        engine.discard()

    def executed() -> None:
        execute(orders, batches, engine, parallel, 7.0)
        engine.discard()

    pairs = [(seconds(executed), seconds(plain)) for _ in range(3)]
    return min(a for a, _ in pairs), min(b for _, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny-hybrid")
    parser.add_argument("--micro-batches", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config, number = config_of(options.model), options.micro_batches
    cores = len(os.sched_getaffinity(0))
    for words in ({}, {"schedule": "gpipe"}, {"schedule": "interleaved", "chunks": 2}):
        layout = LayoutConfig(pp=RANKS, **words)  # type: ignore[arg-type]
        layers = len(config.layers)
        for name, cuts in (
            ("even", even(layers, layout.all_chunks)),
            ("by cost", cuts_of(layout, config, LENGTH)),
        ):
            chosen = LayoutConfig(pp=RANKS, cuts=cuts, **words)  # type: ignore[arg-type]
            found = _ranks.run(RANKS, step_time, options.model, chosen, number)
            predicted = simulate(layout.orders(number), chunk_times(config, cuts)).time
            print(
                f"pipeline, {layout.schedule}, cuts {name}: {found / predicted:.2f}x the simulated "
                f"time ({found:.3f} s and {predicted:.3f} s, {RANKS} stages, {number} "
                f"micro-batches, {cores} cores)"
            )
    ours, plain = _ranks.run(1, overhead, options.model, number)
    print(
        f"executor on one stage: {ours / plain:.4f}x the time of the plain loop "
        f"({ours:.3f} s and {plain:.3f} s)"
    )


if __name__ == "__main__":
    main()
