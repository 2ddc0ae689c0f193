"""Drawing of a run's pipeline schedule, from the simulated step."""

from __future__ import annotations

from ..costs.stages import pipelines, timeline
from ..drawing.gantt import picture
from ..run.job import Job

MOST_ROUNDS = 4
"""Most micro-batches for each stage that are drawn."""


def draw(job: Job) -> tuple[str, str]:
    """Return the drawing of the first phase's step, and what it shows."""
    phase, about = job.plan.phases[0], pipelines(job)[0]
    number = min(about["micro_batches"], MOST_ROUNDS * job.run.layout.pp)
    note = (
        f"{job.run.layout.schedule}, {number} of {about['micro_batches']} micro-batches; "
        f"{about['bubble']:.1%} of a step idle, by the layers' operations"
    )
    return picture(timeline(job, number, phase.seq_len), job.run.layout.pp), note
