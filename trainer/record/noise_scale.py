"""Gradient noise scale: the batch, in tokens, at which noise and gradient have equal norms.

    E |g(B)|² = |G|² + tr(Σ) / B      for the mean gradient g of a batch of B tokens

Two batches give |G|² and tr(Σ); the simple noise scale is tr(Σ) / |G|² (McCandlish et al., arXiv
1812.06162, appendix A.1). Both are noisy, and a mean of ratios is biased: they are averaged apart,
and the ratio is taken of the averages.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...dataplane.runlog.writer import entry_of
from .logger import Entry

if TYPE_CHECKING:
    from ..loop.signals import GradientSquares

DECAY = 0.95
"""Part of the averages that a measured step keeps."""
TAIL = 1 << 22
"""Bytes at the end of signals.jsonl in which a resume looks for the averages."""
STATE = ("noise_trace", "noise_square", "noise_steps")


@dataclass
class NoiseScale:
    """Averages over the measured steps of a run."""

    trace: float = 0.0
    """tr(Σ), for gradients of single tokens."""
    square: float = 0.0
    """|G|²."""
    steps: int = 0

    @classmethod
    def after(cls, signals: Path) -> NoiseScale:
        """Return the averages of a run that has written these signals."""
        if not signals.exists():
            return cls()
        with signals.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines(keepends=True)
        for line in reversed(lines):
            if b'"noise_trace"' in line and (entry := entry_of(line)) is not None:
                trace, square, steps = (entry[name] for name in STATE)
                return cls(trace, square, steps)
        return cls()

    def add(self, found: GradientSquares) -> Entry:
        """Add a measured step; return its fields of the signals. The scale is null while the
        averages are not both above 0."""
        small, whole = found.small_tokens, found.large_tokens
        if 0 < small < whole and math.isfinite(found.small + found.large):
            square = (whole * found.large - small * found.small) / (whole - small)
            trace = (found.small - found.large) / (1 / small - 1 / whole)
            self.steps += 1
            # Weights that add up to 1 from the first step on: later steps count more.
            new = (1 - DECAY) / (1 - DECAY**self.steps)
            self.square += new * (square - self.square)
            self.trace += new * (trace - self.trace)
        known = self.steps > 0 and self.square > 0 and self.trace > 0
        return {
            "noise_scale": self.trace / self.square if known else None,
            **dict(zip(STATE, (self.trace, self.square, self.steps), strict=True)),
        }
