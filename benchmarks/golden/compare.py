"""Comparison of two curves: to the bit, or within bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .trees import Curve

Number = float | None


@dataclass(frozen=True)
class Bounds:
    """Greatest relative difference that rounding may cause: start · 2^(step / doubling), at most
    `max_difference`. A difference of rounding grows exponentially while a model trains on."""

    start: float
    doubling: float
    """Steps in which the bound doubles."""
    max_difference: float

    def at(self, step: int) -> float:
        return float(min(self.start * 2 ** min(step / self.doubling, 64.0), self.max_difference))


@dataclass(frozen=True)
class Limits:
    loss: Bounds
    norm: Bounds


@dataclass(frozen=True)
class Difference:
    """First step that differs too much, or whose ledger hash differs."""

    quantity: str
    step: int
    recorded: str | Number
    trained: str | Number
    limit: float
    """Relative difference that is allowed; 0 compares to the bit."""

    def __str__(self) -> str:
        said = f"{self.quantity} differs at step {self.step}: {self.recorded} → {self.trained}"
        if self.quantity == "ledger":
            return said
        size = relative(self.recorded, self.trained)
        allowed = f"{self.limit:.1e} is allowed" if self.limit else "equal bits are expected"
        return f"{said} (relative difference {size:.1e}; {allowed})"


@dataclass(frozen=True)
class Spread:
    """First step that differs by a bit, and the greatest relative difference with its step."""

    first: int | None
    max_difference: float
    at: int | None

    def __str__(self) -> str:
        if self.first is None:
            return "equal"
        return f"from step {self.first}, at most {self.max_difference:.1e} (step {self.at})"


def relative(a: str | Number, b: str | Number) -> float:
    if a == b:
        return 0.0
    if not isinstance(a, float) or not isinstance(b, float):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b))


def spread(a: Sequence[Number], b: Sequence[Number]) -> Spread:
    sizes = [relative(x, y) for x, y in zip(a, b, strict=False)]
    first = next((step for step, size in enumerate(sizes) if size), None)
    if first is None:
        return Spread(None, 0.0, None)
    max_size = max(sizes)
    return Spread(first, max_size, sizes.index(max_size))


def difference(recorded: Curve, trained: Curve, limits: Limits | None) -> Difference | None:
    """Compare the steps that both curves have; without limits, to the bit. The ledger is always
    compared to the bit. Return the earliest difference."""
    result = []
    for step, (a, b) in enumerate(zip(recorded.ledger, trained.ledger, strict=False)):
        if a != b:
            result.append(Difference("ledger", step, a, b, 0.0))
            break
    curves = (
        ("loss", recorded.loss, trained.loss, limits and limits.loss),
        ("gradient norm", recorded.norm, trained.norm, limits and limits.norm),
    )
    for quantity, ours, theirs, bounds in curves:
        for step, (x, y) in enumerate(zip(ours, theirs, strict=False)):
            limit = bounds.at(step) if bounds else 0.0
            if relative(x, y) > limit:
                result.append(Difference(quantity, step, x, y, limit))
                break
    return min(result, key=lambda candidate: candidate.step, default=None)
