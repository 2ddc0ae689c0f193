"""Draw a run's mixture, and its pipeline schedule."""

from __future__ import annotations

from typing import Any

from ...console.html import gantt
from ...console.html.chart import TOP, Chart
from ...console.html.page import WIDE, colour
from ...trainer.accounting.about import restore_timeline
from .reading.data import RunData, planned_shares, realised_shares


def draw_mixture(run: RunData) -> str:
    """Draw planned and realised shares over the same tokens, the planned ones above."""
    colours = [colour(number) for number in range(len(run.sources))]
    chart = Chart(WIDE, 146, (float(run.plan.first_token), float(run.last_token)))
    chart.bands(
        (phase.name, float(phase.first_token), float(phase.end_token)) for phase in run.plan.phases
    )
    chart.strip("plan", TOP, 46, planned_shares(run), colours, run.sources)
    chart.strip("realised", TOP + 52, 46, realised_shares(run), colours, run.sources)
    chart.x_axis()
    return chart.render("planned and realised shares over tokens")


def draw_schedule(schedule: dict[str, Any]) -> tuple[str, str]:
    """Draw a step in the first phase. Return the drawing and a caption."""
    caption = (
        f"{schedule['name']}, {schedule['drawn']} of {schedule['micro_batches']} micro-batches; "
        f"{schedule['bubble']:.1%} of a step idle, by the layers' operations"
    )
    return gantt.draw_pipeline(restore_timeline(schedule).spans), caption
