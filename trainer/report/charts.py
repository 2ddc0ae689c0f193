"""The chart of a run's mixture."""

from __future__ import annotations

from ..drawing.chart import TOP, Chart
from ..drawing.page import WIDE, colour
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
