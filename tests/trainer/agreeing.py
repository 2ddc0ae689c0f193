"""Tasks for ranks that must agree (see ranks.py): with a fault on rank 1, and without."""

from __future__ import annotations

from datetime import timedelta
from functools import cache
from pathlib import Path

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
def place() -> Parallel:
    return join(LayoutConfig(), "cpu", timedelta(minutes=5))


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
