"""Drawing of a run's pipeline schedule, from the simulated step."""

from __future__ import annotations

from typing import Any

from ..costs.about import timeline_of
from ..drawing.gantt import picture


def draw(schedule: dict[str, Any]) -> tuple[str, str]:
    """Return the drawing of the first phase's step, and what it shows."""
    note = (
        f"{schedule['name']}, {schedule['drawn']} of {schedule['micro_batches']} micro-batches; "
        f"{schedule['bubble']:.1%} of a step idle, by the layers' operations"
    )
    return picture(timeline_of(schedule).spans), note
