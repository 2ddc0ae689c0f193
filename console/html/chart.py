"""Charts as SVG text: a frame with axes, and marks in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from ..progress import format_number

LEFT, RIGHT, TOP, BOTTOM = 58.0, 14.0, 22.0, 26.0
LETTER = 7.0
"""Approximate width of a letter."""
LINE = 18.0
"""Height of a text line."""


@dataclass(frozen=True)
class Curve:
    """A quantity over tokens, or over another x axis."""

    x: list[float]
    y: list[float]


@dataclass
class Chart:
    """Frame whose x axis is tokens, unless `x_unit` says otherwise; y points up."""

    width: float
    height: float
    x_range: tuple[float, float]
    y_range: tuple[float, float] = (0.0, 1.0)
    label: Callable[[float], str] = format_number
    bottom: float = BOTTOM
    x_label: Callable[[float], str] = format_number
    x_unit: str = "tokens"
    x_places: Sequence[float] = ()
    """Tick values instead of round ones; their unit stands a line below."""
    elements: list[str] = field(default_factory=list)

    @property
    def right(self) -> float:
        return self.width - RIGHT

    @property
    def base(self) -> float:
        """Height of the lowest value."""
        return self.height - self.bottom

    def x(self, value: float) -> float:
        """Return the x coordinate of a value, clamped to the frame."""
        low, high = self.x_range
        fraction = (value - low) / (high - low or 1)
        return LEFT + min(max(fraction, 0.0), 1.0) * (self.right - LEFT)

    def y(self, value: float, *, margin: float = 0.0) -> float:
        """Return the y coordinate of a value, clamped to the frame and a margin above and below.

        `margin` counts in heights of the frame.
        """
        low, high = self.y_range
        fraction = (value - low) / (high - low or 1)
        return self.base - min(max(fraction, -margin), 1.0 + margin) * (self.base - TOP)

    def bands(self, spans: Iterable[tuple[str, float, float]]) -> None:
        """Shade spans (name, begin, end); their names stand above if they fit, the widest first."""
        labels: list[tuple[float, float]] = []
        bands = [(self.x(begin), self.x(end), name) for name, begin, end in spans]
        for number, (x1, x2, name) in enumerate(bands):
            self.elements.append(
                f'<rect class="band b{number % 2}" x="{x1:.1f}" y="{TOP}" '
                f'width="{x2 - x1:.1f}" height="{self.base - TOP:.1f}">'
                f"<title>phase {escape(name)}</title></rect>"
            )
        for x1, x2, name in sorted(bands, key=lambda band: band[0] - band[1]):
            half = LETTER * len(name) / 2
            middle = min(max((x1 + x2) / 2, LEFT + half), self.right - half)
            is_free = all(middle + half < start or middle - half > end for start, end in labels)
            if x2 > x1 and is_free:
                labels.append((middle - half - LETTER, middle + half + LETTER))
                self._text("phase", middle, TOP - 8, name)

    def axes(self) -> None:
        """Draw grid lines at round values; below them the x axis."""
        for value in ticks(*self.y_range):
            y = self.y(value)
            self.elements.append(
                f'<line class="grid" x1="{LEFT}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            self._text("tick y", LEFT - 8, y + 3.5, self.label(value))
        self.x_axis()

    def x_axis(self) -> None:
        """Write values below the frame, and their unit; values that would overlap are skipped."""
        y, unit = self.base + 18, self.x_unit
        self._text("tick end", self.right, y + LINE if self.x_places else y, unit)
        label_end = 0.0
        limit = self.width if self.x_places else self.right - LETTER * (len(unit) + 1)
        for value in self.x_places or ticks(*self.x_range, count=7):
            x, label = self.x(value), self.x_label(value)
            half = LETTER * len(label) / 2
            if label_end <= x - half and x + half < limit:
                self._text("tick x", x, y, label)
                label_end = x + half + LETTER

    def line(self, curve: Curve, style: str, colour: str | None = None) -> None:
        if not curve.x:
            return
        paint = f' style="stroke:{colour}"' if colour else ""
        self._clipped(f'<polyline class="{style}"{paint} points="{self._points(curve)}"/>')
        if len(curve.x) == 1:
            fill = f' style="fill:{colour}"' if colour else ""
            x, y = self.x(curve.x[0]), self.y(curve.y[0])
            self.elements.append(f'<circle class="dot"{fill} cx="{x:.1f}" cy="{y:.1f}" r="3"/>')

    def area(self, curve: Curve, style: str, colour: str | None = None) -> None:
        if len(curve.x) < 2:
            return
        first, last = self.x(curve.x[0]), self.x(curve.x[-1])
        paint = f' style="fill:{colour}"' if colour else ""
        self._clipped(
            f'<polygon class="{style}"{paint} points="{first:.1f},{self.base} '
            f'{self._points(curve)} {last:.1f},{self.base}"/>'
        )

    def marks(self, values: Iterable[float], kind: str, title: str) -> None:
        """Draw a vertical line at each event's x value."""
        for value in values:
            x = self.x(value)
            self.elements.append(
                f'<g class="mark {kind}"><title>{escape(title)} at {self.x_label(value)} '
                f"{self.x_unit}</title>"
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{self.base}"/>'
                f'<circle cx="{x:.1f}" cy="{TOP}" r="3.2"/></g>'
            )

    def limit(self, value: float, text: str) -> None:
        """Draw a line across the frame at a value that must not be passed; `text` explains it."""
        y = self.y(value)
        self.elements.append(
            f'<line class="limit" x1="{LEFT}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
        self._text("", LEFT + 6, y - 4, text)

    def strip(
        self,
        name: str,
        top: float,
        height: float,
        columns: Iterable[tuple[float, float, list[float]]],
        colours: Sequence[str],
        names: Sequence[str],
    ) -> None:
        """Draw shares stacked over tokens, in columns (begin, end, shares)."""
        self._text("tick y", LEFT - 8, top + height / 2 + 4, name)
        for begin, end, shares in columns:
            x1, x2 = self.x(begin), self.x(end)
            y = top
            for source, colour, share in zip(names, colours, shares, strict=True):
                if share <= 0 or x2 <= x1:
                    continue
                self.elements.append(
                    f'<rect class="share" x="{x1:.2f}" y="{y:.2f}" '
                    f'width="{x2 - x1 + 0.35:.2f}" height="{share * height:.2f}" '
                    f'fill="{colour}"><title>{escape(source)} {share:.1%}</title></rect>'
                )
                y += share * height

    def tooltips(self, columns: Iterable[tuple[float, float, str]]) -> None:
        """Add columns (begin, end, text) that show a text under the pointer.

        Call last: they must be on top.
        """
        for begin, end, text in columns:
            x1, x2 = self.x(begin), self.x(end)
            self.elements.append(
                f'<rect class="probe" x="{x1:.2f}" y="{TOP}" width="{x2 - x1:.2f}" '
                f'height="{self.base - TOP:.1f}"><title>{escape(text)}</title></rect>'
            )

    def _points(self, curve: Curve) -> str:
        pairs = zip(curve.x, curve.y, strict=True)
        return " ".join(f"{self.x(x):.1f},{self.y(y, margin=5):.1f}" for x, y in pairs)

    def _clipped(self, svg: str) -> None:
        """Clip to the frame: a nested SVG shows its view box alone."""
        # Slightly wider than the frame: a line on its edge keeps its full width.
        box = f"{LEFT - 1} {TOP - 1} {self.right - LEFT + 2} {self.base - TOP + 2}"
        x, y, width, height = box.split()
        self.elements.append(
            f'<svg class="box" x="{x}" y="{y}" width="{width}" height="{height}" '
            f'viewBox="{box}">{svg}</svg>'
        )

    def _text(self, style: str, x: float, y: float, text: str) -> None:
        self.elements.append(f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>')

    def render(self, title: str) -> str:
        """Return the chart as HTML."""
        return (
            f'<div class="scroll"><svg class="{"wide" if self.width > 600 else "half"}" '
            f'viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" '
            f'aria-label="{escape(title)}">{"".join(self.elements)}</svg></div>'
        )


def ticks(low: float, high: float, *, count: int = 5) -> list[float]:
    """Return about `count` round numbers between two values."""
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
    """Return a range with a margin around all finite values."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return (0.0, 1.0)
    low, high = (0.0 if zero else min(finite)), max(finite)
    space = (high - low) * margin or abs(high) * margin or 1.0
    return (low if zero else low - space, high + space)
