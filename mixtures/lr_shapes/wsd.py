"""Shape wsd (warm-up, stable, decay): constant, then linear to `end` over the last `decay` tokens.

A run can be extended from the stable part, and decayed later.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .shape import LearningRate


@dataclass(frozen=True, kw_only=True)
class WarmupStableDecay(LearningRate):
    """A learning rate that stays at `peak`, then goes to `end` over the last `decay` tokens."""

    shape: Literal["wsd"] = "wsd"
    """Stays at `peak`, then goes to `end` in a straight line over the last `decay` tokens."""

    def after_warmup(self, token: float, tokens: int) -> float:
        assert self.decay is not None
        decayed = max(token - (tokens - self.decay), 0.0) / self.decay
        return self.peak + (self.end - self.peak) * min(decayed, 1.0)

    def shape_problems(self) -> Iterator[tuple[str, str]]:
        if self.decay is None:
            yield "decay", "is required by shape wsd: tokens of the decay at the end of the phase"
        elif self.decay == 0:
            yield "decay", "is 0; shape wsd decays over at least one token"
