"""Shape linear: a straight line from `peak` to `end`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .shape import LearningRate


@dataclass(frozen=True, kw_only=True)
class Linear(LearningRate):
    """A learning rate that goes from `peak` to `end` in a straight line."""

    shape: Literal["linear"] = "linear"
    """Goes to `end` in a straight line."""

    def after_warmup(self, token: float, tokens: int) -> float:
        return self.peak + (self.end - self.peak) * self.progress(token, tokens)
