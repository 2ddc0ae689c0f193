"""Base class for learning-rate shapes: warm-up, common settings, checks."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class LearningRate(ABC):
    """The learning rate over a phase, in multiples of the run's peak.

    A subclass sets `shape` to its name in the YAML, defines the rate after the warm-up, and may
    add settings of its own.
    """

    peak: float = 1.0
    """Learning rate at the end of the warm-up."""
    warmup: int = 0
    """Tokens over which the rate rises linearly from `warmup_from` to `peak`."""
    warmup_from: float = 0.0
    """Learning rate at the start of the warm-up."""
    shape: str
    """Shape of the rate after the warm-up: a name in SHAPES."""
    end: float = 0.0
    """Learning rate at the end of the phase; unused by shape constant."""
    decay: int | None = None
    """Tokens of the final decay, for shapes that have one (wsd)."""
    read_at: ClassVar[float] = 0.5
    """Where within a step the rate is read, as a fraction of the tokens: the middle."""

    def factor(self, token: float, tokens: int) -> float:
        """Compute the learning rate at `token` in a phase with `tokens` tokens."""
        if token < self.warmup:
            return self.warmup_from + (self.peak - self.warmup_from) * token / self.warmup
        return self.after_warmup(token, tokens)

    @abstractmethod
    def after_warmup(self, token: float, tokens: int) -> float:
        """Compute the learning rate at `token` ≥ warmup in a phase with `tokens` tokens."""

    def progress(self, token: float, tokens: int) -> float:
        """Compute the progress after the warm-up, from 0 to 1."""
        return min((token - self.warmup) / max(tokens - self.warmup, 1), 1.0)

    def problems(self, tokens: int) -> Iterator[tuple[str, str]]:
        """Yield wrong settings, for a phase with `tokens` tokens: key ("" for all of `lr`) and
        message."""
        for field in fields(LearningRate):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and (value < 0 or not math.isfinite(value)):
                yield field.name, f"is {value:g}; it must be a finite number of at least 0"
        if self.warmup_from and not self.warmup:
            yield "warmup_from", "needs a `warmup` that starts there"
        yield from self.shape_problems()
        if 0 < tokens < self.warmup + (self.decay or 0):
            yield "", f"warm-up and decay are longer than the phase ({tokens:,} tokens)"

    def shape_problems(self) -> Iterator[tuple[str, str]]:
        """Yield settings that this shape cannot use: key and message."""
        if self.decay is not None:
            yield "decay", f"is not used by shape {self.shape}, which decays over the whole phase"

    def corners(self, tokens: int) -> Iterator[int]:
        """Yield tokens at which the curve bends; a plot must not smooth over them."""
        yield self.warmup
        yield tokens - (self.decay or 0)
