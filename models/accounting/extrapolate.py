"""Passes at numbers of rows and lengths that do not run, from those that do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

from .pieces import Pass, Passes, Piece


def fitted(points: Sequence[int], found: Sequence[Passes], at: int) -> Passes:
    """Return the passes at another point: each number on the polynomial through all points."""
    if len(points) == 1:
        return found[0]

    def of_passes(each: Iterable[Pass]) -> Pass:
        return tuple(
            Piece(
                extrapolated(points, [piece.high for piece in pieces], at),
                extrapolated(points, [piece.change for piece in pieces], at),
                pieces[0].gradient,
                extrapolated(points, [piece.size for piece in pieces], at),
            )
            for pieces in zip(*each, strict=True)
        )

    return Passes(
        of_passes(passes.forward for passes in found),
        of_passes(passes.backward for passes in found),
    )


def extrapolated(points: Sequence[int], sizes: Sequence[int], at: int) -> int:
    """Return the value of the polynomial through all points."""
    total = Fraction(0)
    for point, size in zip(points, sizes, strict=True):
        term = Fraction(size)
        for other in points:
            if other != point:
                term *= Fraction(at - other, point - other)
        total += term
    return round(total)
