"""Gradient noise scale: the batch in tokens at which noise and gradient have equal norms.

    E |g(B)|² = |G|² + tr(Σ) / B      for the mean gradient g of a batch of B tokens

Two batches give |G|² and tr(Σ); the simple noise scale is tr(Σ) / |G|² (McCandlish et al., arXiv
1812.06162, appendix A.1). Both are noisy, and a mean ratio is biased: the scale is the ratio
between their averages.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...dataplane.runlog.writer import decode_line
from .logger import Entry

if TYPE_CHECKING:
    from ..loop.signals import GradientSquares

DECAY = 0.95
"""Weight that the previous averages keep in a measured step."""
TAIL = 1 << 22
"""Bytes at the end of signals.jsonl that a resume scans for the averages."""
STATE = ("noise_trace", "noise_square", "noise_steps")


@dataclass
class NoiseScale:
    """Running averages over measured steps."""

    trace: float = 0.0
    """tr(Σ), for gradients at single tokens."""
    square: float = 0.0
    """|G|²."""
    steps: int = 0

    @classmethod
    def restore(cls, signals: Path) -> NoiseScale:
        """Restore the averages from the last measured step in signals.jsonl."""
        if not signals.exists():
            return cls()
        with signals.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            lines = file.read().splitlines(keepends=True)
        for line in reversed(lines):
            if b'"noise_trace"' in line and (entry := decode_line(line)) is not None:
                return cls(*(entry[key] for key in STATE))
        return cls()

    def add(self, squares: GradientSquares) -> Entry:
        """Add a measured step and return its fields for signals.jsonl. The scale is None until both
        averages are above 0."""
        small, large = squares.small_tokens, squares.large_tokens
        if 0 < small < large and math.isfinite(squares.small + squares.large):
            square = (large * squares.large - small * squares.small) / (large - small)
            trace = (squares.small - squares.large) / (1 / small - 1 / large)
            self.steps += 1
            # The weights add up to 1 from the first step on, and later steps count more.
            weight = (1 - DECAY) / (1 - DECAY**self.steps)
            self.square += weight * (square - self.square)
            self.trace += weight * (trace - self.trace)
        known = self.steps > 0 and self.square > 0 and self.trace > 0
        return {
            "noise_scale": self.trace / self.square if known else None,
            **dict(zip(STATE, (self.trace, self.square, self.steps), strict=True)),
        }
