"""Measured seconds and bytes of a run beside those that its layout plan predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...console.progress import as_bytes
from ...dataplane.runlog import writer as events
from ...dataplane.storage import storage
from ...dataplane.storage.sealed import sealed, unsealed

if TYPE_CHECKING:
    from ..run.job import Job
    from ..run.layout_plan import LayoutPlan

EVENT = "measured"
"""Event of a start that measured its steps."""


def of_run(job: Job) -> dict[str, Any] | None:
    """Return the prediction beside the run's last measurement; None if it lacks one of the two."""
    from ..run.plan_check import prediction

    plan = prediction(job)
    found = [entry for entry in events.read(job.folder.events) if entry["event"] == EVENT]
    if plan is None or not found:
        return None
    clock = clock_of(job)
    return {
        "hardware": plan.planned.hardware,
        "clock": clock,
        "phases": list(_phases(job, plan, found[-1]["phases"], clock)),
        "memory": _memory(job, plan, found[-1]),
    }


def clock_of(job: Job) -> str:
    """Return the time that is compared. On a CPU a rank of one thread is compared by its CPU time:
    other programs do not count, and no rank of a single stage waits in the prediction."""
    alone = job.run.device == "cpu" and job.threads == 1 and job.run.layout.pp == 1
    return "cpu_seconds" if alone else "seconds"


def _phases(
    job: Job, plan: LayoutPlan, found: dict[str, Any], clock: str
) -> Iterator[dict[str, Any]]:
    predicted = {(each.seq_len, each.batch_tokens): each.seconds for each in plan.planned.phases}
    for phase in job.plan.phases:
        if phase.name in found:
            tokens = phase.seq_len * phase.batch_rows
            seconds = predicted[phase.seq_len, tokens]
            own = found[phase.name]
            yield {
                "phase": phase.name,
                "seq_len": phase.seq_len,
                "batch_tokens": tokens,
                "predicted": seconds,
                "measured": own[clock],
                "ratio": seconds / own[clock],
                "seconds": own["seconds"],
                "steps": own["steps"],
            }


def _memory(job: Job, plan: LayoutPlan, found: dict[str, Any]) -> dict[str, Any]:
    """Compare the bytes with the prediction of the phases in which they were measured."""
    ranks, names = found["memory"], found["memory_phases"]
    by_size = {(each.seq_len, each.batch_tokens): each.memory for each in plan.planned.phases}
    sizes = [
        by_size[phase.seq_len, phase.seq_len * phase.batch_rows]
        for phase in job.plan.phases
        if phase.name in names
    ]
    predicted = max(sizes, default=plan.predicted.memory)
    known = [size for size in ranks if size is not None]
    return {
        "predicted": predicted,
        "measured": ranks,
        "ratio": predicted / max(known) if known else None,
        "phases": names,
    }


def write(file: Path, beside: dict[str, Any]) -> None:
    storage.write(str(file), sealed(beside, indent=1))


def read(file: Path) -> dict[str, Any]:
    """Return what `write` has written."""
    hint = "remove the file: the next report compares the run's measurement again"
    return unsealed(str(file), file.read_bytes(), hint=hint)


def in_phases(names: Sequence[str], before: str = "") -> str:
    """Return the phases in which bytes were measured, for a person; empty if they are unknown."""
    return f"{before}phase{'s' * (len(names) > 1)} {', '.join(names)}" if names else ""


def lines(beside: dict[str, Any]) -> list[str]:
    """Format the comparison for a person."""
    unit = "CPU s" if beside["clock"] == "cpu_seconds" else "s"
    text = [
        f"predicted {each['predicted']:.4g} s a step, measured {each['measured']:.4g} {unit} "
        f"({each['ratio']:.2f}): phase {each['phase']}, median of {each['steps']} steps"
        for each in beside["phases"]
    ]
    memory = beside["memory"]
    if memory["ratio"] is not None:
        most = max(size for size in memory["measured"] if size is not None)
        text.append(
            f"predicted {as_bytes(memory['predicted'])} a rank, measured {as_bytes(most)} of "
            f"tensors ({memory['ratio']:.2f}){in_phases(memory['phases'], ': ')}"
        )
    return text
