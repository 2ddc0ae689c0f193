"""Timelines: lanes of bars over time, such as a pipeline's step with a lane for each stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple, Protocol

from .chart import ticks

WIDTH, LEFT = 1080.0, 86.0
LANE, GAP = 22.0, 6.0
AXIS = 22.0
MIN_WIDTH = 0.8
"""Minimum width of a bar."""
LABEL_WIDTH = 14.0
"""Minimum width of a pass that shows its micro-batch's number."""
FADED = 0.55
"""Opacity of a stage's second chunk; the third is drawn like the first."""


class Bar(NamedTuple):
    start: float
    end: float
    style: str
    """Classes in the style sheet."""
    title: str
    """Text under the pointer."""
    text: str = ""
    """Text in the bar, if it fits."""
    opacity: float = 1.0
    fill: str = ""
    """Colour, if the style has none."""


class Pass(Protocol):
    """A micro-batch's pass through a chunk, as a schedule's action has it."""

    @property
    def kind(self) -> str: ...
    @property
    def chunk(self) -> int: ...
    @property
    def micro(self) -> int: ...


def draw_pipeline(
    spans_by_stage: Sequence[Sequence[tuple[Pass, float, float]]],
    *,
    updates: Sequence[float] = (),
    until: float = 0.0,
    axis: Callable[[float], str] | None = None,
) -> str:
    """Draw each stage's passes (pass, start, end) in seconds as an SVG.

    `updates` are seconds that a stage takes after its passes; the time goes on to `until`, and
    `axis` labels it.
    """
    lanes, total = [], max([until, *(end for spans in spans_by_stage for *_, end in spans)])
    for stage, spans in enumerate(spans_by_stage):
        bars = [
            Bar(
                start,
                end,
                f"pass {action.kind}",
                f"chunk {action.chunk}, micro-batch {action.micro}, {action.kind}",
                str(action.micro),
                FADED if action.chunk // len(spans_by_stage) % 2 else 1.0,
            )
            for action, start, end in spans
        ]
        if updates:
            end = bars[-1].end
            bars.append(Bar(end, end + updates[stage], "pass update", "gradients and optimizer"))
            total = max(total, bars[-1].end)
        lanes.append((f"stage {stage}", bars))
    return draw_timeline(lanes, total, axis)


def draw_timeline(
    lanes: Sequence[tuple[str, Sequence[Bar]]],
    total: float,
    axis: Callable[[float], str] | None = None,
) -> str:
    """Draw named lanes from 0 to `total` as an SVG; `axis` labels the time below."""
    scale = (WIDTH - LEFT) / total
    height = len(lanes) * (LANE + GAP) - GAP
    elements = []
    if axis:
        for value in ticks(0.0, total, count=8):
            x = LEFT + value * scale
            elements.append(
                f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height:.1f}"/>'
                f'<text class="tick {"x" if x < WIDTH - 30 else "end"}" x="{x:.1f}" '
                f'y="{height + 16:.1f}">{escape(axis(value))}</text>'
            )
    for number, (name, bars) in enumerate(lanes):
        top = number * (LANE + GAP)
        middle = top + LANE / 2 + 4
        elements.append(
            f'<text class="tick y" x="{LEFT - 8}" y="{middle:.1f}">{escape(name)}</text>'
        )
        for bar in bars:
            x, width = LEFT + bar.start * scale, (bar.end - bar.start) * scale
            fill = f' fill="{bar.fill}"' if bar.fill else ""
            elements.append(
                f'<rect class="{bar.style}" x="{x:.1f}" y="{top:.1f}" height="{LANE}" '
                f'width="{max(width - min(1, width / 4), MIN_WIDTH):.1f}" '
                f'opacity="{bar.opacity}"{fill}>'
                f"<title>{escape(bar.title)}</title></rect>"
            )
            if bar.text and width >= LABEL_WIDTH:
                elements.append(
                    f'<text class="pass" x="{x + width / 2:.1f}" y="{middle:.1f}">{bar.text}</text>'
                )
    height += AXIS if axis else 0
    svg = f'<svg class="wide" viewBox="0 0 {WIDTH:.0f} {height:.0f}">{"".join(elements)}</svg>'
    return f'<div class="scroll">{svg}</div>'
