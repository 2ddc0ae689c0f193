"""Signals of a run beside its losses: ranks that hold the others up."""

from __future__ import annotations

from html import escape

from ...console.html.page import section
from ...trainer.record.stragglers import BEGINS, ENDS
from .reading.data import RunData


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
