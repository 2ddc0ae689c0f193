"""Render a run's slow ranks."""

from __future__ import annotations

from html import escape

from ...console.html.page import section
from ...trainer.record.stragglers import BEGINS, ENDS
from .reading.data import RunData


def stragglers(run: RunData) -> str:
    """Render the events about ranks that were slow in many consecutive steps."""
    events = [event for event in run.events if event["event"] in (BEGINS, ENDS)]
    if not events:
        return ""
    rows = "".join(
        f"<tr><th>{event['step']:,}</th><td>{escape(event['what'])}</td></tr>" for event in events
    )
    table = f'<div class="scroll"><table class="history"><tbody>{rows}</tbody></table></div>'
    return section("Slow ranks", table)
