"""Train the runs of a comparison in rounds, and measure their recall.

All runs reach the end of a round before one begins the next, so they stand at equal tokens whenever
the time ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...console.errors import RunError
from ...dataplane.runlog import writer as lines
from ...trainer.checkpoints import store
from ...trainer.cluster.ranks import INTERRUPTED
from ..anneal.train import Interrupted, run_trainer
from .folder import ComparedRun, ComparisonFolder

TASKS = ("mqar", "needle")


def train(folder: ComparisonFolder, entries: Sequence[ComparedRun], ends: Iterable[int]) -> None:
    """Train every run to each step of `ends`. A run that stands there already is not started."""
    for end in ends:
        for entry in entries:
            checkpoints = folder.run_folder(entry).checkpoints
            if store.reached(checkpoints, end):
                continue
            code = run_trainer([*_run_arguments(folder, entry), "--stop-after", str(end)])
            if store.reached(checkpoints, end):
                continue
            if code == INTERRUPTED:
                raise Interrupted
            raise RunError(
                f"{folder.run_folder(entry).root} failed with exit code {code}",
                hint="its error is above; the same command goes on",
            )


def _run_arguments(folder: ComparisonFolder, entry: ComparedRun) -> list[str]:
    return [
        "run",
        str(folder.settings),
        *("--model", str(folder.model_file(entry.model))),
        *("--mixture", str(folder.mixture)),
        *("--out", str(folder.run_folder(entry).root)),
        f"seed={entry.seed}",
    ]


def measure_recall(
    folder: ComparisonFolder,
    entry: ComparedRun,
    step: int,
    *,
    data: str,
    lengths: Sequence[int],
    examples: int,
) -> None:
    """Measure a run's recall at a step's checkpoint, unless it was."""
    run = folder.run_folder(entry)
    if has_recall(folder, entry, step, lengths, examples):
        return
    arguments = ["recall", str(run.root), "--step", str(step), "--data", data]
    arguments += ["--tasks", ",".join(TASKS), "--lengths", ",".join(map(str, lengths))]
    if code := run_trainer([*arguments, "--examples", str(examples)]):
        raise RunError(f"the recall of {run.root} was not measured: exit code {code}")


def has_recall(
    folder: ComparisonFolder, entry: ComparedRun, step: int, lengths: Sequence[int], examples: int
) -> bool:
    file = folder.run_folder(entry).recall
    return file.exists() and any(
        line["step"] == step
        and line["examples"] == examples
        and [score["length"] for score in line["tasks"].get(TASKS[0], [])] == list(lengths)
        for line in lines.read(file)
    )
