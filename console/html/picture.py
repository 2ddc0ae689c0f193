"""Pictures: a grid of charts in one SVG file, for a browser or a page."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .chart import LETTER, Chart
from .page import colour
from .style import CHARTS, COLOURS

MARGIN, TITLE, KEY = 16.0, 26.0, 18.0
"""Space around the picture, for a chart's title, and for a line in the legend."""
STYLE = f"{COLOURS}{CHARTS}svg {{ background:var(--paper); }} .title {{ font-weight:600; }}"


def draw_picture(
    rows: Sequence[Sequence[tuple[str, Chart]]], keys: Sequence[str], title: str
) -> str:
    """Draw rows of titled charts below a legend."""
    elements, y = _legend(keys, max(sum(chart.width for _, chart in row) for row in rows))
    width = 0.0
    for row in rows:
        x = MARGIN
        for name, chart in row:
            elements.append(f'<text class="title" x="{x}" y="{y + 16}">{escape(name)}</text>')
            elements.append(
                f'<svg x="{x}" y="{y + TITLE}" width="{chart.width}" height="{chart.height}">'
                f"{''.join(chart.elements)}</svg>"
            )
            x += chart.width
        width = max(width, x + MARGIN)
        y += TITLE + max(chart.height for _, chart in row)
    height = y + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img"><title>{escape(title)}</title>'
        f"<style>{STYLE}</style>{''.join(elements)}</svg>\n"
    )


def _legend(keys: Sequence[str], width: float) -> tuple[list[str], float]:
    """Return the keys in their colours, in lines no wider than `width`, and the last line's end."""
    elements, x, y = [], MARGIN, MARGIN
    for number, key in enumerate(keys):
        key_width = 18 + LETTER * len(key)
        if x > MARGIN and x + key_width > width:
            x, y = MARGIN, y + KEY
        elements.append(
            f'<rect x="{x}" y="{y}" width="10" height="10" rx="3" fill="{colour(number)}"/>'
            f'<text x="{x + 15}" y="{y + 9.5}">{escape(key)}</text>'
        )
        x += key_width + 14
    return elements, y + KEY
