"""A picture: charts below and beside each other, as one SVG file for a browser or a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .chart import LETTER, Chart
from .page import colour
from .style import CHARTS, COLOURS

MARGIN, TITLE, KEY = 16.0, 26.0, 18.0
"""Space around the picture, above each chart for its title, and for a line of the legend."""
STYLE = f"{COLOURS}{CHARTS}svg {{ background:var(--paper); }} .title {{ font-weight:600; }}"


def picture(rows: Sequence[Sequence[tuple[str, Chart]]], keys: Sequence[str], title: str) -> str:
    """Draw rows of charts, each below its title, with a legend above them."""
    parts, legend_end = _legend(keys, max(sum(chart.width for _, chart in row) for row in rows))
    y, width = legend_end, 0.0
    for row in rows:
        x = MARGIN
        for name, chart in row:
            parts.append(f'<text class="title" x="{x}" y="{y + 16}">{escape(name)}</text>')
            parts.append(
                f'<svg x="{x}" y="{y + TITLE}" width="{chart.width}" height="{chart.height}">'
                f"{''.join(chart.parts)}</svg>"
            )
            x += chart.width
        width = max(width, x + MARGIN)
        y += TITLE + max(chart.height for _, chart in row)
    height = y + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>{''.join(parts)}</svg>\n"
    )


def _legend(keys: Sequence[str], width: float) -> tuple[list[str], float]:
    """Return the keys with their colours, in lines of this width, and where the last line ends."""
    parts, x, y = [], MARGIN, MARGIN
    for number, key in enumerate(keys):
        needed = 18 + LETTER * len(key)
        if x > MARGIN and x + needed > width:
            x, y = MARGIN, y + KEY
        parts.append(
            f'<rect x="{x}" y="{y}" width="10" height="10" rx="3" fill="{colour(number)}"/>'
            f'<text x="{x + 15}" y="{y + 9.5}">{escape(key)}</text>'
        )
        x += needed + 14
    return parts, y + KEY
