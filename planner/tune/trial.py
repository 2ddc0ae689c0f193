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
"""Error of a run without enough memory. Linux ends such a process by SIGKILL."""
ERROR_LINES = 12
"""Last lines of a failed trial's output, which its result has as its error."""

TrialOutcome = Literal["measured", "memory", "failed"]


@dataclass(frozen=True, kw_only=True)
class TrialResult:
    """A trial's outcome and measurements: the fields are the keys of its file in `results/`."""

    outcome: TrialOutcome
    """`memory`: a rank ran out of memory."""
    seconds: float | None = None
    """Median time of a step."""
    clock: str = "seconds"
    """How the step was timed: `seconds` of wall-clock time, or `cpu_seconds`."""
    memory: int | None = None
    """Peak bytes in tensors on the fullest rank; None: not measured."""
    error: str = ""
    """Last lines of a failed run's output."""


@dataclass(frozen=True, kw_only=True)
class LayoutTrial:
    """A layout plan to measure, with a row length and a batch."""

    plan: LayoutPlan
    file: Path
    """The plan's file."""
    folder: Path
    """The run's folder."""
    steps: int
    seq_len: int
    batch_tokens: int


Runner = Callable[[LayoutTrial], TrialResult]


@dataclass(frozen=True)
class ProcessRunner:
    """Runs a trial on this machine as a `trainer run`."""

    arguments: Sequence[str]
    """Arguments of `trainer run` that all trials share: run file, model and overrides."""

    def __call__(self, trial: LayoutTrial) -> TrialResult:
        if trial.folder.exists():  # a killed tune left it
            shutil.rmtree(trial.folder)
        trial.folder.parent.mkdir(parents=True, exist_ok=True)
        # -P: no file in the working directory hides a module.
        process = subprocess.run(
            [sys.executable, "-P", "-m", "headrace.trainer.cli", "run", *self._arguments(trial)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=die_with_parent,
            check=False,
        )
        shutil.rmtree(RunFolder(trial.folder).checkpoints, ignore_errors=True)
        if process.returncode == 0:
            return read_result(trial.folder)
        last_lines = "\n".join(process.stdout.strip().splitlines()[-ERROR_LINES:])
        outcome: TrialOutcome = "memory" if died_of_memory(process.stdout) else "failed"
        return TrialResult(outcome=outcome, error=last_lines)

    def _arguments(self, trial: LayoutTrial) -> list[str]:
        return [
            *self.arguments,
            *("--layout", str(trial.file), "--out", str(trial.folder)),
            *("--processes", str(trial.plan.planned.gpus)),
            f"synthetic.steps={trial.steps}",
            f"synthetic.seq_len={trial.seq_len}",
            f"synthetic.batch_rows={trial.batch_tokens // trial.seq_len}",
            f"checkpoints.every={trial.steps}",
            "watch.tensorboard=false",
        ]


def died_of_memory(output: str) -> bool:
    """Return True if an error of a run's output is about memory; hints do not count."""
    return OUT_OF_MEMORY.search(output) is not None


def read_result(folder: Path) -> TrialResult:
    """Return a finished run's result, from its one phase."""
    record = measured.read(folder / MEASURED)
    [phase] = record["phases"]
    sizes = [size for size in record["memory"]["measured"] if size is not None]
    return TrialResult(
        outcome="measured",
        seconds=phase["measured"],
        clock=record["clock"],
        memory=max(sizes, default=None),
    )
