"""A tiny model that trains four steps on random tokens in the real loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.configs import CONFIGS

from headrace.models.accounting.count import build_meta
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.model.model import initial_weights
from headrace.trainer.checkpoints import saver
from headrace.trainer.checkpoints.policy import CheckpointConfig
from headrace.trainer.checkpoints.store import RunState
from headrace.trainer.engines.engine import load_weights
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.objective import Objective
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.loop.batches import MicroBatch
from headrace.trainer.loop.hooks.hook import Hook, StepRecord
from headrace.trainer.loop.loop import Loop, LoopOptions
from headrace.trainer.loop.synthetic import SyntheticConfig, SyntheticLoader, SyntheticPlan
from headrace.trainer.record.config import WatchConfig
from headrace.trainer.record.logger import LoggedRun
from headrace.trainer.record.loggers.jsonl import JsonLines
from headrace.trainer.record.speed import Speed
from headrace.trainer.record.steps import RunRecorder

PLAN = SyntheticPlan(SyntheticConfig(steps=4, seq_len=16, batch_rows=6), 37, 1)


@dataclass
class Kept(Hook):
    records: list[StepRecord] = field(default_factory=list)

    def step_done(self, record: StepRecord) -> None:
        self.records.append(record)

    def evaluated(self, step: Any, evaluation: Any) -> None:
        raise AssertionError("nothing is evaluated here")


def steps(step: int, rows: int) -> Iterator[Sequence[MicroBatch]]:
    return iter(SyntheticLoader(PLAN, rank=0, world=1, micro_batch=rows, start_step=step))


def make(parallel: Parallel, **options: Any) -> tuple[Loop, Kept]:
    model = build_meta(load_model_config(CONFIGS / "tiny.yaml"))
    engine = Fsdp2Config().build(
        Objective(model), AdamWConfig(lr=1e-2), PRECISIONS["fp32"], parallel
    )
    load_weights(engine, initial_weights(model.config, 3))
    kept = Kept()
    rows = options.pop("steps", steps)
    chosen = LoopOptions(**{"micro_batch_tokens": 32, "seed": 1, **options})
    loop = Loop(PLAN, rows, lambda step: 1e-2, engine, parallel, chosen, hooks=[kept])
    return loop, kept


def begin() -> RunState:
    return RunState(step=0, row=0, tokens=0, plan_hash=PLAN.hash, updates=0, ledger="", seed=1)


def saving(folder: RunFolder, parallel: Parallel) -> Loop:
    """A loop that records and saves in `folder`, a checkpoint after every step."""
    folder.checkpoints.mkdir(parents=True)
    loop, _ = make(parallel, save_every=1)
    watch = WatchConfig()
    run = LoggedRun(folder=folder, plan=PLAN, watch=watch, first_step=0, stream=None)  # type: ignore[arg-type]
    recorder = RunRecorder(PLAN, [JsonLines(run)], Speed({16: 1.0}, {16: 1.0}, peak=None))
    loop.hooks.hooks = [recorder]
    loop.checkpoints = saver.Saver(  # type: ignore[assignment]  # nothing is restored
        folder.checkpoints, CheckpointConfig(), parallel.checkpoint, report=recorder.sealed
    )
    return loop
