"""Charts of a run's mixture and of its pipeline's schedule."""

from __future__ import annotations

from typing import Any

from ...console.html import gantt
from ...console.html.chart import TOP, Chart
from ...console.html.page import WIDE, colour
from ...trainer.accounting.about import restore_timeline
from .reading.data import RunData, planned_over_tokens, realised_over_tokens


def mixture(run: RunData) -> str:
    """Draw the planned shares above the realised shares, over the same tokens."""
    colours = [colour(number) for number in range(len(run.sources))]
    chart = Chart(WIDE, 146, (float(run.plan.first_token), float(run.last_token)))
    chart.bands(
        (phase.name, float(phase.first_token), float(phase.last_token)) for phase in run.plan.phases
    )
    chart.strip("plan", TOP, 46, planned_over_tokens(run), colours, run.sources)
    chart.strip("realised", TOP + 52, 46, realised_over_tokens(run), colours, run.sources)
    chart.x_axis()
    return chart.text("planned and realised shares over tokens")


def pipeline(schedule: dict[str, Any]) -> tuple[str, str]:
    """Return the drawing of the first phase's step, and what it shows."""
    note = (
        f"{schedule['name']}, {schedule['drawn']} of {schedule['micro_batches']} micro-batches; "
        f"{schedule['bubble']:.1%} of a step idle, by the layers' operations"
    )
    return gantt.picture(restore_timeline(schedule).spans), note
