"""Passes at row counts and lengths that do not run, extrapolated from those that do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from .pieces import Pass, Passes, PassSegment


def fit_passes(points: Sequence[int], samples: Sequence[Passes], target: int) -> Passes:
    """Return the passes at `target`: each number lies on the polynomial through all points."""
    if len(points) == 1:
        return samples[0]

    def fit(passes: Iterable[Pass]) -> Pass:
        return tuple(
            PassSegment(
                extrapolate(points, [segment.high for segment in segments], target),
                extrapolate(points, [segment.change for segment in segments], target),
                segments[0].gradient,
                extrapolate(points, [segment.size for segment in segments], target),
            )
            for segments in zip(*passes, strict=True)
        )

    return Passes(
        fit(passes.forward for passes in samples),
        fit(passes.backward for passes in samples),
    )


def extrapolate(points: Sequence[int], values: Sequence[int], target: int) -> int:
    """Evaluate the polynomial through all points (Lagrange) at `target`."""
    total = Fraction(0)
    for point, value in zip(points, values, strict=True):
        term = Fraction(value)
        for node in points:
            if node != point:
                term *= Fraction(target - node, point - node)
        total += term
    return round(total)
