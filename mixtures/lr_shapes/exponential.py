"""Shape exponential: the same factor per token, from `peak` to `end`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .shape import LearningRate


@dataclass(frozen=True, kw_only=True)
class Exponential(LearningRate):
    """A learning rate that goes from `peak` to `end`, multiplied by the same factor per token."""

    shape: Literal["exponential"] = "exponential"
    """Goes to `end`, multiplied by the same factor per token; needs an `end` above 0."""

    def after_warmup(self, token: float, tokens: int) -> float:
        return self.peak * math.pow(self.end / self.peak, self.progress(token, tokens))

    def shape_problems(self) -> Iterator[tuple[str, str]]:
        yield from super().shape_problems()
        if not (self.end > 0 and self.peak > 0):
            yield "end", "exponential decay needs an `end` and a `peak` above 0"
