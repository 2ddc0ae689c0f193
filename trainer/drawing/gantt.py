"""Drawing of a pipeline's step: a lane of passes for each stage."""

from __future__ import annotations

from ..pipeline.simulate import Timeline

WIDTH, LEFT = 1080.0, 58.0
LANE, GAP = 22.0, 6.0
DIGITS = 14.0
"""Least width of a pass that shows the number of its micro-batch."""
FADED = 0.55
"""Opacity of the second chunk of a stage; the third is drawn like the first."""


def picture(simulated: Timeline, stages: int) -> str:
    """Return an SVG of the passes of each stage in time."""
    scale = (WIDTH - LEFT) / simulated.time
    parts = []
    for stage, spans in enumerate(simulated.spans):
        top = stage * (LANE + GAP)
        middle = top + LANE / 2 + 4
        parts.append(f'<text class="tick y" x="{LEFT - 8}" y="{middle:.1f}">stage {stage}</text>')
        for span in spans:
            action, x = span.action, LEFT + span.start * scale
            width = (span.end - span.start) * scale
            shade = FADED if action.chunk // stages % 2 else 1.0
            parts.append(
                f'<rect class="pass {action.kind}" x="{x:.1f}" y="{top:.1f}" height="{LANE}" '
                f'width="{max(width - 1, 0.5):.1f}" opacity="{shade}"><title>chunk {action.chunk}, '
                f"micro-batch {action.micro}, {action.kind}</title></rect>"
            )
            if width >= DIGITS:
                parts.append(
                    f'<text class="pass" x="{x + width / 2:.1f}" y="{middle:.1f}">{action.micro}'
                    "</text>"
                )
    height = stages * (LANE + GAP) - GAP
    return f'<svg class="wide" viewBox="0 0 {WIDTH:.0f} {height:.0f}">{"".join(parts)}</svg>'
