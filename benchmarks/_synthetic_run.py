"""The real loop over rows of random tokens, with documents as the caller packs them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from headrace.trainer.checkpoints.store import RunState
from headrace.trainer.engines.engine import Engine
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.loop.guard import Guard
from headrace.trainer.loop.hooks.hook import Hook
from headrace.trainer.loop.loop import Loop, LoopOptions
from headrace.trainer.loop.synthetic import (
    SyntheticBatch,
    SyntheticConfig,
    SyntheticLoader,
    SyntheticPlan,
)

MEDIAN, SPREAD = 700, 1.0
"""Median length of a document, and standard deviation of its logarithm."""

Boundaries = Callable[[int], Sequence[int]]
"""Maps the number of a row to the boundaries of its documents."""


def documents(tokens: int, seed: int = 0, median: float = MEDIAN) -> list[int]:
    """Return the boundaries of documents of log-normal lengths in a row."""
    generator = torch.Generator().manual_seed(seed)
    ends = [0]
    while ends[-1] < tokens:
        drawn = math.exp(SPREAD * float(torch.randn((), generator=generator)))
        ends.append(min(tokens, ends[-1] + max(1, round(median * drawn))))
    return ends


def plan_rows(vocab_size: int, steps: int, tokens: int, batch_rows: int = 1) -> SyntheticPlan:
    """Plan steps of rows of random tokens."""
    config = SyntheticConfig(steps=steps, seq_len=tokens, batch_rows=batch_rows, warmup=0)
    return SyntheticPlan(config=config, vocab_size=vocab_size, seed=0)


def train(
    engine: Engine,
    parallel: Parallel,
    vocab_size: int,
    hooks: Sequence[Hook] = (),
    *,
    steps: int,
    tokens: int,
    boundaries: Boundaries,
    micro_batches: int = 1,
    rows: int = 1,
    guard: Guard | None = None,
    loop_options: LoopOptions | None = None,
    **options: Any,
) -> None:
    """Train for some steps; a micro-batch has rows of so many tokens. `loop_options` are those of a
    run; else the loop has its defaults, with a guard and `options`."""
    plan = plan_rows(vocab_size, steps, tokens, micro_batches * rows)
    if loop_options is None:
        loop_options = LoopOptions(
            micro_batch_tokens=rows * tokens, seed=0, guard=guard or Guard(), **options
        )

    def packed(batch: SyntheticBatch) -> SyntheticBatch:
        bounds = [boundaries(row) for row in batch.rows]
        ends = torch.tensor(
            [0, *(index * tokens + end for index, row in enumerate(bounds) for end in row[1:])],
            dtype=torch.int32,
        )
        if parallel.device.type != "cuda":
            return replace(batch, cu_seqlens=ends)
        # As the loader's prefetch does it: a copy from pinned memory does not wait.
        pinned = {name: getattr(batch, name) for name in ("tokens", "targets", "weights")}
        pinned = {name: tensor.pin_memory() for name, tensor in pinned.items()}
        return replace(batch, cu_seqlens=ends, **pinned)

    def load(start: int, size: int) -> Iterator[list[SyntheticBatch]]:
        loader = SyntheticLoader(plan, rank=0, world=1, micro_batch=size, start_step=start)
        return ([packed(batch) for batch in step] for step in loader)

    start = RunState(
        step=0, row=0, tokens=0, plan_hash=plan.hash, updates=0, ledger="0" * 32, seed=0
    )
    Loop(plan, load, lambda _: 1e-4, engine, parallel, loop_options, hooks=hooks).run(start)
