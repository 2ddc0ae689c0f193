"""Signals of a run beside its losses: ranks that hold the others up."""

from __future__ import annotations

from html import escape

from ..drawing.page import section
from ..record.stragglers import BEGINS, ENDS
from . import charts
from .data import RunData


def slowest_rank(run: RunData) -> str:
    """Return the chart of the slowest rank's lag, if the ranks were timed."""
    if not any("slowest_lag" in entry for entry in run.metrics):
        return ""
    chart = charts.small(run, "slowest_lag", "lag of the slowest rank, percent", percent=True)
    return section("Slowest rank", chart, unit="its lag, percent of the step")


def stragglers(run: RunData) -> str:
    """Return the table of the ranks that were slow in many steps in a row."""
    events = [event for event in run.events if event["event"] in (BEGINS, ENDS)]
    if not events:
        return ""
    rows = "".join(
        f"<tr><th>{event['step']:,}</th><td>{escape(event['what'])}</td></tr>" for event in events
    )
    table = f'<div class="scroll"><table class="history"><tbody>{rows}</tbody></table></div>'
    return section("Slow ranks", table)
