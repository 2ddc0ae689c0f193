"""A small SVG figure that is readable in light and dark, and at the width of a phone."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

COLOURS = ("#2e7da6", "#b3661a", "#3d8453", "#93468d", "#6b7280")
"""White text on each of them is readable."""

STYLE = """\
text { font: 13px system-ui, sans-serif; fill: #1f2937 }
.small { font-size: 11px } .mono { font-family: ui-monospace, monospace }
.strong { font-weight: 600 } .on { fill: #ffffff }
.quiet { fill: #5b6472 } .ground { fill: #ffffff }
.edge { stroke: #8a93a1; fill: none } .empty { fill: #e5e7eb }
@media (prefers-color-scheme: dark) {
  text { fill: #e5e7eb } .on { fill: #ffffff } .quiet { fill: #a3acb9 } .ground { fill: #1b212c }
  .empty { fill: #374151 }
}"""
"""Both forms are in one file: GitHub and the site show it as the reader's system asks."""


class Figure:
    """A drawing of `width` units, which a phone shows at about three quarters of their size."""

    def __init__(self, title: str, height: float, width: float = 480) -> None:
        self.width, self.height = width, height
        self.shapes = [f'<rect class="ground" width="{width}" height="{height}" rx="8"/>']
        self.shapes.insert(0, f"<title>{escape(title)}</title>")

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}"'
        self.shapes.append(f'<text class="{kind}" {place}>{escape(words)}</text>')

    def box(
        self,
        place: tuple[float, float],
        size: tuple[float, float],
        colour: str | None = None,
        words: str = "",
    ) -> None:
        """Draw a rectangle with a word in its middle; without a colour it is an empty one."""
        (x, y), (width, height) = place, size
        fill = f'fill="{colour}"' if colour else 'class="empty"'
        self.shapes.append(
            f'<rect {fill} x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="2"/>'
        )
        if words:
            kind = "small on" if colour else "small"
            self.text(x + width / 2, y + height / 2 + 4, words, kind, "middle")

    def path(self, way: str, more: str = "") -> None:
        self.shapes.append(f'<path class="edge" d="{way}" {more}/>')

    def line(self, points: Iterable[tuple[float, float]], colour: str) -> None:
        way = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.shapes.append(
            f'<polyline points="{way}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )

    def arrow(self, x: float, y: float, length: float = 12) -> None:
        """Draw an arrow that points down."""
        self.path(f"M{x:g} {y:g}v{length:g}m-4 -5l4 5l4 -5")

    def svg(self) -> str:
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">'
        return "\n".join([head, f"<style>\n{STYLE}\n</style>", *self.shapes, "</svg>"]) + "\n"
