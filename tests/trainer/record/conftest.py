"""Records of a small run, and the loggers that get them."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.dataplane.runlog import writer
from headrace.trainer.engines.update import Update
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.loop.guard import SkippedStep
from headrace.trainer.loop.hooks.hook import StepRecord
from headrace.trainer.loop.step_stats import StepStats
from headrace.trainer.loop.synthetic import SyntheticConfig, SyntheticPlan
from headrace.trainer.record.config import WatchConfig
from headrace.trainer.record.logger import LoggedRun
from headrace.trainer.record.loggers import open_loggers
from headrace.trainer.record.speed import Speed
from headrace.trainer.record.steps import RunRecorder

PLAN = SyntheticPlan(SyntheticConfig(steps=10, seq_len=8, batch_rows=5), 50, 1)


@dataclass
class Records:
    """Opens recorders of one run's folder, as its starts do."""

    folder: RunFolder
    terminal: io.StringIO = field(default_factory=io.StringIO)
    peak: float | None = 1e6

    def open(self, **watch: Any) -> RunRecorder:
        config = WatchConfig(**{"log_seconds": 1e9, "tensorboard": False, **watch})
        run = LoggedRun(
            folder=self.folder, plan=PLAN, watch=config, first_step=0, stream=self.terminal
        )
        speed = Speed({8: 2000.0}, {8: 2500.0}, peak=self.peak)
        return RunRecorder(PLAN, open_loggers(run), speed)

    def step(
        self, number: int, loss: float = 3.0, *, skipped: SkippedStep | None = None
    ) -> StepRecord:
        stats = StepStats(
            losses=[loss * 40],
            weights=[40.0],
            rows=[5],
            digests=b"",
            metrics={"data_wait": 0.1},
        )
        update = Update(1.5, applied=skipped is None)
        return StepRecord(PLAN.step(number), stats, update, 1e-3, 0.4, f"hash{number}", skipped)

    def lines(self, name: str) -> list[dict[str, Any]]:
        return list(writer.read(self.folder.root / f"{name}.jsonl"))


@pytest.fixture
def records(tmp_path: Path) -> Callable[..., Records]:
    return lambda **options: Records(RunFolder(tmp_path), **options)
