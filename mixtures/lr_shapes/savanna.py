"""Shape savanna: the schedule of Savanna (and GPT-NeoX), with a floor instead of an end.

    p = (t − warmup) / T                      T: `period`, the whole phase by default
    cosine:       max(peak · (1 + cos πp) / 2, end)
    linear:       max(peak · (1 − p), end)
    exponential:  max(peak · exp(−0.693·p), end)

The decay is relative to the whole period, warm-up included, and stops at t = T − warmup. The floor
`end` cuts the curve off; other shapes reach `end` at the phase's end. A step has the rate at its
first token, so the first step after a warm-up from 0 has rate 0, as in Savanna.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from .shape import LearningRate

STYLES: dict[str, Callable[[float], float]] = {
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
    "exponential": lambda done: math.exp(-0.693 * done),
}
"""Rate relative to the peak, without the floor, by the fraction of the period that is done."""


@dataclass(frozen=True, kw_only=True)
class Savanna(LearningRate):
    """A learning rate that decays over `period` as in Savanna, and never falls below `end`."""

    shape: Literal["savanna"] = "savanna"
    """Decays as in Savanna; `end` is a floor."""
    style: Literal["cosine", "linear", "exponential"] = "cosine"
    """Curve of the decay: Savanna's `lr_decay_style`."""
    period: int | None = None
    """Tokens of Savanna's `lr_decay_iters`; the phase's tokens if unset."""
    read_at: ClassVar[float] = 0.0
    """The rate is read at the first token of a step."""

    def after_warmup(self, token: float, tokens: int) -> float:
        period = self.period or tokens
        done = (min(token, period - self.warmup) - self.warmup) / max(period, 1)
        return max(self.peak * STYLES[self.style](done), self.end)

    def problems(self, tokens: int) -> Iterator[tuple[str, str]]:
        yield from super().problems(tokens)
        if 0 < (self.period or tokens) < 2 * self.warmup:
            yield "warmup", "is longer than half of the period, where Savanna's formula breaks down"

    def shape_problems(self) -> Iterator[tuple[str, str]]:
        yield from super().shape_problems()
        if self.period is not None and self.period < 1:
            yield "period", f"is {self.period}; it must be at least 1 token"
        if self.end > self.peak:
            yield "end", f"is {self.end:g}; a floor cannot be above the peak ({self.peak:g})"

    def corners(self, tokens: int) -> Iterator[int]:
        yield self.warmup
        yield min((self.period or tokens) - self.warmup, tokens)
