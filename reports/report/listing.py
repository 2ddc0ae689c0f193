"""List the runs in and below folders, a line each, from the ends of their files."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...console.errors import RunError, UserError
from ...console.explain import path_hint
from ...console.progress import format_duration, format_number
from ...dataplane.runlog import writer as lines
from ...trainer.checkpoints import store
from ...trainer.folders.folder import RunFolder
from ...trainer.run.stored import read_run
from ...trainer.scores.records import read_gaps
from ..board.runs import derive_status, holds_run, inner_folders

UNREADABLE = "unreadable"


@dataclass(frozen=True)
class ListedRun:
    folder: str
    status: str
    step: int | None = None
    """Steps taken so far."""
    last_step: int | None = None
    """Planned steps."""
    tokens: int | None = None
    loss: float | None = None
    tokens_per_second: float | None = None
    checkpoint: int | None = None
    """Step at the latest checkpoint that has a manifest."""
    changed: float | None = None
    """Time of the latest step or event, in seconds since 1970."""
    problem: str | None = None
    """Reason for which the run cannot be read, or scores that it was to have."""


def find_runs(places: Sequence[str]) -> list[RunFolder]:
    """Return the runs in and below `places`, by path, without duplicates and hidden folders."""
    for place in places:
        if not Path(place).is_dir():
            raise RunError(
                f"there is no folder {place}", hint=path_hint(Path(place), "name folders of runs")
            )
    folders: dict[Path, RunFolder] = {}
    for place in places:
        for folder in _find_below(Path(place)):
            folders.setdefault(folder.root.resolve(), folder)
    return list(folders.values())


def _find_below(place: Path) -> Iterator[RunFolder]:
    if holds_run(place):
        yield RunFolder(place)
        return
    for path in inner_folders(place):
        yield from _find_below(path)


def scan_run(folder: RunFolder) -> ListedRun:
    """Read a run's status and figures. A run that cannot be read is listed with its problem."""
    try:
        job = read_run(folder)
    except UserError as error:
        return ListedRun(str(folder.root), UNREADABLE, problem=" ".join(error.message.split()))
    step, event = lines.read_last(folder.metrics) or {}, lines.read_last(folder.events)
    gaps = read_gaps(folder, job.run.scores, job.plan.end_step)
    problems = [f"{gap.sentence()}; `{gap.command(str(folder.root))}`" for gap in gaps]
    newest_checkpoint = store.newest_complete(folder.checkpoints)
    files = (path for path in (folder.metrics, folder.events, folder.run) if path.exists())
    return ListedRun(
        folder=str(folder.root),
        status=derive_status(event, ended=folder.holder_has_ended, gaps=gaps),
        step=step["step"] + 1 if step else job.plan.first_step,
        last_step=job.plan.end_step,
        tokens=step.get("tokens"),
        loss=step.get("loss"),
        tokens_per_second=step.get("tokens_per_second"),
        checkpoint=None if newest_checkpoint is None else store.parse_step(newest_checkpoint),
        changed=max(path.stat().st_mtime for path in files),
        problem="; ".join(problems) or None,
    )


def table(runs: Sequence[ListedRun]) -> str:
    """Format the runs as a table for a terminal."""
    if not runs:
        return "no runs"
    rows = [("run", "status", "step", "loss", "tokens/s", "checkpoint", "changed")]
    rows += [(run.folder, run.status, *_cells(run)) for run in runs]
    widths = [max(len(row[column]) for row in rows) for column in range(7)]
    formatted = [
        "  ".join(
            cell.rjust(width) if column in (2, 3, 4, 5) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    problems = [f"{run.folder}: {run.problem}" for run in runs if run.problem]
    return "\n".join([*formatted, *problems])


def _cells(run: ListedRun) -> tuple[str, str, str, str, str]:
    if run.status == UNREADABLE:
        return "–", "–", "–", "–", "–"
    assert run.changed is not None
    return (
        f"{run.step:,}/{run.last_step:,}",
        "–" if run.loss is None else f"{run.loss:.4f}",
        "–" if run.tokens_per_second is None else format_number(run.tokens_per_second),
        "–" if run.checkpoint is None else f"{run.checkpoint:,}",
        f"{format_duration(max(0.0, time.time() - run.changed))} ago",
    )
