"""Shape constant: `peak` until the end of the phase."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .shape import LearningRate


@dataclass(frozen=True, kw_only=True)
class Constant(LearningRate):
    """A learning rate that stays at `peak` after the warm-up."""

    shape: Literal["constant"] = "constant"
    """Stays at `peak`."""

    def after_warmup(self, token: float, tokens: int) -> float:
        return self.peak

    def shape_problems(self) -> Iterator[tuple[str, str]]:
        if self.end:
            yield "end", "is not used by shape constant, which stays at `peak`"
        if self.decay is not None:
            yield "decay", "is not used by shape constant, which stays at `peak`"
