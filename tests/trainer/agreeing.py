"""Tasks for ranks that must agree (see ranks.py): with a fault on rank 1, and without."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from headrace.console.errors import RunError
from headrace.models.accounting.count import build_meta
from headrace.models.config import load_model_config
from headrace.models.model import initial_weights
from headrace.models.precision import PRECISIONS
from headrace.trainer.checkpoints.store import RunState
from headrace.trainer.engines import give
from headrace.trainer.engines.engine import Engine
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.objective import Objective
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.groups import Parallel, join
from headrace.trainer.loop.loop import Loop, LoopOptions
from headrace.trainer.loop.synthetic import SyntheticConfig, SyntheticLoader, SyntheticPlan
from headrace.trainer.record.steps import NullRecorder

TINY = Path(__file__).with_name("tiny.yaml")


@cache
def place(tp: int = 1, cp: int = 1) -> Parallel:
    return join(LayoutConfig(tp=tp, cp=cp), "cpu", timedelta(minutes=5))


def make_engine() -> Engine:
    shape = load_model_config(TINY)
    objective = Objective(build_meta(shape))
    engine = Fsdp2Config().build(objective, AdamWConfig(lr=1e-2), PRECISIONS["fp32"], place())
    give(engine, initial_weights(shape, 3))
    return engine


def take_rows(as_rank: list[int]) -> str:
    """Train two steps; each rank reads the rows of the data-parallel rank `as_rank` names."""
    plan = SyntheticPlan(SyntheticConfig(steps=2, seq_len=16, batch_rows=4), 37, 1)
    rank, world = as_rank[dist.get_rank()], dist.get_world_size()
    loop = Loop(
        plan,
        lambda step, rows: iter(
            SyntheticLoader(plan, rank=rank, world=world, micro_batch=rows, start_step=step)
        ),
        plan.lr_factor,
        make_engine(),
        place(),
        LoopOptions(micro_batch_tokens=32, seed=1),
        recorder=NullRecorder(),
    )
    state = RunState(step=0, row=0, tokens=0, plan_hash=plan.hash, updates=0, ledger="", seed=1)
    try:
        return "finished" if loop.run(state)[1] else "stopped"
    except RunError as error:
        return f"{error.what}; {error.where}"


GENOME = SyntheticPlan(SyntheticConfig(steps=1, seq_len=16, batch_rows=4), 37, 1)
"""A step whose targets are bases, masked bases and control tags, by their ids."""


def weights_of(targets: torch.Tensor) -> torch.Tensor:
    return torch.tensor([1.0, 0.1, 0.0])[targets % 3]


@dataclass
class Kept(NullRecorder):
    found: list[list[float]] = field(default_factory=list)

    def record(self, record: Any) -> None:
        self.found.append([record.stats.loss, record.update.grad_norm])


def divided_loss(tp: int, cp: int, divisor: Any) -> list[float]:
    """Return the loss and the gradient norm of the step, in micro-batches of one row."""
    parallel, shape, kept = place(tp, cp), load_model_config(TINY), Kept()
    model = build_meta(shape)
    model.shard(parallel.axes)
    engine = Fsdp2Config().build(
        Objective(model, divisor=divisor), AdamWConfig(), PRECISIONS["fp32"], parallel
    )
    give(engine, initial_weights(shape, 3))
    axis = parallel.axes.context

    def steps(step: int, rows: int) -> Iterator[Sequence[Any]]:
        loader = SyntheticLoader(
            GENOME,
            rank=parallel.dp_rank,
            world=parallel.dp,
            micro_batch=rows,
            start_step=step,
            context_rank=axis.rank,
            context_size=axis.size,
        )
        for batches in loader:
            yield [replace(each, weights=weights_of(each.targets)) for each in batches]

    options = LoopOptions(micro_batch_tokens=16 // cp, seed=1)
    loop = Loop(GENOME, steps, GENOME.lr_factor, engine, parallel, options, recorder=kept)
    loop.run(RunState(step=0, row=0, tokens=0, plan_hash=GENOME.hash, updates=0, ledger="", seed=1))
    return kept.found[0]
