"""Shape cosine: half a period of a cosine from `peak` to `end`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from .shape import LearningRate


@dataclass(frozen=True, kw_only=True)
class Cosine(LearningRate):
    """A learning rate that goes from `peak` to `end` along half a cosine."""

    shape: Literal["cosine"] = "cosine"
    """Goes to `end` along half a cosine."""

    def after_warmup(self, token: float, tokens: int) -> float:
        done = self.progress(token, tokens)
        return self.end + (self.peak - self.end) * (1 + math.cos(math.pi * done)) / 2
