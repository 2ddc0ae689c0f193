"""A trial: a short run of a layout plan with synthetic rows, and its result."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...trainer.accounting import measured
from ...trainer.cluster.ranks import die_with_parent
from ...trainer.folders.folder import MEASURED, RunFolder
from ...trainer.run.layout_plan import LayoutPlan

OUT_OF_MEMORY = re.compile(r"^error:.*( ran out of memory| was killed by SIGKILL)", re.MULTILINE)
"""Error of a run that died of memory. Linux ends such a process by SIGKILL."""
SHOWN = 12
"""Last lines of a failed trial that are kept."""

Outcome = Literal["measured", "memory", "failed"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of a trial."""

    outcome: Outcome
    """`memory`: a rank ran out of memory."""
    seconds: float | None = None
    """Median step, by the clock that the prediction is compared with."""
    clock: str = "seconds"
    memory: int | None = None
    """Bytes of tensors on the fullest rank."""
    error: str = ""
    """Last lines of a run that failed."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A layout plan to measure, for steps of one length and batch."""

    plan: LayoutPlan
    file: Path
    """The plan's file."""
    folder: Path
    """Folder of the run."""
    steps: int
    seq_len: int
    batch_tokens: int


Runner = Callable[[Trial], Result]


@dataclass(frozen=True)
class Runs:
    """Runs trials on this machine, each as a `trainer run` of its own."""

    words: Sequence[str]
    """Model, run and overrides of each trial."""

    def __call__(self, trial: Trial) -> Result:
        if trial.folder.exists():  # of a tune that was killed
            shutil.rmtree(trial.folder)
        trial.folder.parent.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-P", "-m", "headrace.trainer.cli", "run", *self._words(trial)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent,
            check=False,
        )
        shutil.rmtree(RunFolder(trial.folder).checkpoints, ignore_errors=True)
        if done.returncode == 0:
            return read(trial.folder)
        last = "\n".join(done.stdout.strip().splitlines()[-SHOWN:])
        outcome: Outcome = "memory" if died_of_memory(done.stdout) else "failed"
        return Result(outcome=outcome, error=last)

    def _words(self, trial: Trial) -> list[str]:
        return [
            *self.words,
            *("--layout", str(trial.file), "--out", str(trial.folder)),
            *("--processes", str(trial.plan.planned.gpus)),
            f"synthetic.steps={trial.steps}",
            f"synthetic.seq_len={trial.seq_len}",
            f"synthetic.batch_rows={trial.batch_tokens // trial.seq_len}",
            f"checkpoints.every={trial.steps}",
            "watch.tensorboard=false",
        ]


def died_of_memory(output: str) -> bool:
    """Return True if the error in a run's output is one of memory; hints may speak of it too."""
    return OUT_OF_MEMORY.search(output) is not None


def read(folder: Path) -> Result:
    """Return the result of a finished run."""
    beside = measured.read(folder / MEASURED)
    [phase] = beside["phases"]
    known = [size for size in beside["memory"]["measured"] if size is not None]
    return Result(
        outcome="measured",
        seconds=phase["measured"],
        clock=beside["clock"],
        memory=max(known, default=None),
    )
