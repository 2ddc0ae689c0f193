"""Measured seconds and bytes of a run beside those that its layout plan predicts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...console.progress import as_bytes
from ...dataplane.runlog import writer as events
from ...dataplane.storage import storage

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
        "memory": _memory(plan, found[-1]["memory"]),
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


def _memory(plan: LayoutPlan, ranks: list[int | None]) -> dict[str, Any]:
    known = [size for size in ranks if size is not None]
    return {
        "predicted": plan.predicted.memory,
        "measured": ranks,
        "ratio": plan.predicted.memory / max(known) if known else None,
    }


def write(file: Path, beside: dict[str, Any]) -> None:
    storage.write(str(file), json.dumps(beside, indent=1).encode())


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
            f"tensors ({memory['ratio']:.2f})"
        )
    return text
