"""Charts as SVG text: a frame that knows its axes, and marks that are put into it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from ...console.progress import human
from .data import Curve

LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 22.0, 26.0


@dataclass
class Chart:
    """A frame over tokens; y goes up."""

    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    label: Callable[[float], str] = human
    parts: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        low, high = self.x_range
        return LEFT + (value - low) / (high - low or 1) * (self.width - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.y_range
        share = (value - low) / (high - low or 1)
        return self.height - BOTTOM - share * (self.height - TOP - BOTTOM)

    def bands(self, spans: Sequence[tuple[str, float, float]]) -> None:
        """Spans shaded in turn, with their names above."""
        for number, (name, begin, end) in enumerate(spans):
            left, right = self.x(begin), self.x(end)
            self.parts.append(
                f'<rect class="band b{number % 2}" x="{left:.1f}" y="{TOP}" '
                f'width="{right - left:.1f}" height="{self.height - TOP - BOTTOM:.1f}"/>'
            )
            if right - left > 7 * len(name):
                middle = (left + right) / 2
                self.parts.append(
                    f'<text class="phase" x="{middle:.1f}" y="{TOP - 8}">{escape(name)}</text>'
                )

    def axes(self, *, x_labels: bool = True) -> None:
        for value in ticks(*self.y_range):
            y = self.y(value)
            self.parts.append(
                f'<line class="grid" x1="{LEFT}" x2="{self.width - RIGHT}" '
                f'y1="{y:.1f}" y2="{y:.1f}"/>'
                f'<text class="tick y" x="{LEFT - 8}" y="{y + 3.5:.1f}">{self.label(value)}</text>'
            )
        if x_labels:
            self.parts.append(
                f'<text class="tick end" x="{self.width - RIGHT}" y="{self.height - 8}">'
                "tokens</text>"
            )
            for value in ticks(*self.x_range, count=7):
                if self.x(value) > self.width - RIGHT - 55:  # the axis' name stands there
                    continue
                self.parts.append(
                    f'<text class="tick x" x="{self.x(value):.1f}" '
                    f'y="{self.height - 8}">{human(value)}</text>'
                )

    def line(self, curve: Curve, style: str, colour: str | None = None) -> None:
        if not curve.x:
            return
        points = " ".join(
            f"{self.x(x):.1f},{self._inside(y):.1f}" for x, y in zip(curve.x, curve.y, strict=True)
        )
        paint = f' style="stroke:{colour}"' if colour else ""
        self.parts.append(f'<polyline class="{style}"{paint} points="{points}"/>')
        if len(curve.x) == 1:
            fill = f' style="fill:{colour}"' if colour else ""
            x, y = self.x(curve.x[0]), self._inside(curve.y[0])
            self.parts.append(f'<circle class="dot"{fill} cx="{x:.1f}" cy="{y:.1f}" r="3"/>')

    def area(self, curve: Curve, style: str) -> None:
        if len(curve.x) < 2:
            return
        base = self.height - BOTTOM
        points = " ".join(
            f"{self.x(x):.1f},{self._inside(y):.1f}" for x, y in zip(curve.x, curve.y, strict=True)
        )
        first, last = self.x(curve.x[0]), self.x(curve.x[-1])
        self.parts.append(
            f'<polygon class="{style}" points="{first:.1f},{base} {points} {last:.1f},{base}"/>'
        )

    def marks(self, places: Iterable[float], title: str) -> None:
        """Upright lines at tokens where something happened."""
        for place in places:
            x = self.x(place)
            self.parts.append(
                f'<g class="mark"><title>{escape(title)} at {human(place)} tokens</title>'
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{self.height - BOTTOM}"/>'
                f'<circle cx="{x:.1f}" cy="{TOP}" r="3.2"/></g>'
            )

    def _inside(self, value: float) -> float:
        """A value's height; what lies outside of the range stays on its edge."""
        return min(max(self.y(value), TOP), self.height - BOTTOM)

    def text(self, title: str) -> str:
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" '
            f'aria-label="{escape(title)}">{"".join(self.parts)}</svg>'
        )


def strip(
    width: float,
    height: float,
    x_range: tuple[float, float],
    pieces: Iterable[tuple[float, float, list[float]]],
    colours: Sequence[str],
    names: Sequence[str],
) -> str:
    """Shares stacked over tokens: one column for each piece."""
    low, high = x_range
    scale = (width - LEFT - RIGHT) / (high - low or 1)
    parts = [f'<rect class="empty" x="{LEFT}" width="{width - LEFT - RIGHT}" height="{height}"/>']
    for begin, end, shares in pieces:
        top = 0.0
        for name, colour, share in zip(names, colours, shares, strict=True):
            if share <= 0:
                continue
            parts.append(
                f'<rect x="{LEFT + (begin - low) * scale:.2f}" y="{top:.2f}" '
                f'width="{(end - begin) * scale + 0.35:.2f}" height="{share * height:.2f}" '
                f'fill="{colour}"><title>{escape(name)} {share:.1%}</title></rect>'
            )
            top += share * height
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" preserveAspectRatio="none" '
        f'shape-rendering="crispEdges">'
        f"{''.join(parts)}</svg>"
    )


def ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """Round numbers between two values."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(m * size for m in (1, 2, 2.5, 5, 10) if m * size >= rough)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def bounds(
    values: Iterable[float], *, zero: bool = False, margin: float = 0.06
) -> tuple[float, float]:
    """A range that shows all values with some air."""
    known = [value for value in values if math.isfinite(value)]
    if not known:
        return (0.0, 1.0)
    low, high = (0.0 if zero else min(known)), max(known)
    air = (high - low) * margin or abs(high) * margin or 1.0
    return (low if zero else low - air, high + air)
