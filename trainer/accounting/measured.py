"""Compare a run's measured seconds and bytes with those that its layout plan predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...console.progress import format_bytes
from ...dataplane.order.row_lengths import split_by_length
from ...dataplane.runlog import writer as events
from ...dataplane.storage import storage
from ...dataplane.storage.sealed import seal, unseal

if TYPE_CHECKING:
    from ..run.job import Job
    from ..run.layout_plan import LayoutPlan

EVENT = "measured"
"""Event in which a start records its measurement."""


def compare_run(job: Job) -> dict[str, Any] | None:
    """Compare the run's last measurement with the prediction; None if the run lacks either."""
    from ..run.plan_check import followed_plan

    plan = followed_plan(job)
    measurements = [entry for entry in events.read(job.folder.events) if entry["event"] == EVENT]
    if plan is None or not measurements:
        return None
    newest, clock = measurements[-1], comparison_clock(job)
    return {
        "hardware": plan.planned.hardware,
        "clock": clock,
        "phases": list(_compare_phases(job, plan, newest["phases"], clock)),
        "memory": _compare_memory(job, plan, newest),
    }


def comparison_clock(job: Job) -> str:
    """Return the key of the time to compare.

    A single-threaded rank on a CPU is compared by CPU time, which excludes other programs. With
    several stages it is not: then the prediction includes waiting.
    """
    by_cpu_time = job.run.device == "cpu" and job.threads == 1 and job.run.layout.pp == 1
    return "cpu_seconds" if by_cpu_time else "seconds"


def _compare_phases(
    job: Job, plan: LayoutPlan, measured: dict[str, Any], clock: str
) -> Iterator[dict[str, Any]]:
    predicted_seconds = {
        (phase.seq_len, phase.batch_tokens): phase.seconds for phase in plan.planned.phases
    }
    for phase in split_by_length(job.plan):
        if phase.name in measured:
            batch_tokens = phase.seq_len * phase.batch_rows
            predicted = predicted_seconds[phase.seq_len, batch_tokens]
            times = measured[phase.name]
            yield {
                "phase": phase.name,
                "seq_len": phase.seq_len,
                "batch_tokens": batch_tokens,
                "predicted": predicted,
                "measured": times[clock],
                "ratio": predicted / times[clock],
                "seconds": times["seconds"],
                "steps": times["steps"],
            }


def _compare_memory(job: Job, plan: LayoutPlan, measured: dict[str, Any]) -> dict[str, Any]:
    """Compare the measured bytes with the prediction for the phases that were measured."""
    bytes_by_rank, phases = measured["memory"], measured["memory_phases"]
    predicted_bytes = {
        (phase.seq_len, phase.batch_tokens): phase.memory for phase in plan.planned.phases
    }
    sizes = [
        predicted_bytes[phase.seq_len, phase.seq_len * phase.batch_rows]
        for phase in split_by_length(job.plan)
        if phase.name in phases
    ]
    predicted = max(sizes, default=plan.predicted.memory)
    known = [size for size in bytes_by_rank if size is not None]
    return {
        "predicted": predicted,
        "measured": bytes_by_rank,
        "ratio": predicted / max(known) if known else None,
        "phases": phases,
    }


def write(file: Path, comparison: dict[str, Any]) -> None:
    storage.write(str(file), seal(comparison, indent=1))


def read(file: Path) -> dict[str, Any]:
    """Read a comparison that `write` has stored. Raise IntegrityError if it is damaged."""
    hint = "remove the file: the next report compares the run's measurement again"
    return unseal(str(file), file.read_bytes(), hint=hint)


def format_phases(names: Sequence[str], prefix: str = "") -> str:
    """Format the measured phases for a person; empty if they are unknown."""
    return f"{prefix}phase{'s' * (len(names) > 1)} {', '.join(names)}" if names else ""


def lines(comparison: dict[str, Any]) -> list[str]:
    """Format the comparison for a person."""
    unit = "CPU s" if comparison["clock"] == "cpu_seconds" else "s"
    formatted = [
        f"predicted {phase['predicted']:.4g} s a step, measured {phase['measured']:.4g} {unit} "
        f"({phase['ratio']:.2f}): phase {phase['phase']}, median of {phase['steps']} steps"
        for phase in comparison["phases"]
    ]
    memory = comparison["memory"]
    if memory["ratio"] is not None:
        measured = format_bytes(max(size for size in memory["measured"] if size is not None))
        formatted.append(
            f"predicted {format_bytes(memory['predicted'])} a rank, measured {measured} of "
            f"tensors ({memory['ratio']:.2f}){format_phases(memory['phases'], ': ')}"
        )
    return formatted
