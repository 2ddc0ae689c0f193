"""Forward and backward passes as segments: memory over time, in bytes.

A backward segment ends where a parameter gradient is complete. The engine decides how long that
gradient lives, so it counts to the end of its segment only. Adjacent layers' passes are contiguous:
a pass starts at the level where the previous pass ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PassSegment:
    """A stretch of a pass, in bytes."""

    high: int
    """Peak, relative to the level at the start."""
    change: int
    """Level at the end, relative to the start."""
    gradient: str = ""
    """Parameter whose gradient is complete at the end, or empty."""
    size: int = 0
    """That gradient's bytes: included in `high`, but not in `change`."""


Pass = tuple[PassSegment, ...]


def sum_changes(segments: Pass) -> int:
    """Return a pass's final level, relative to its start."""
    return sum(segment.change for segment in segments)


def find_peak(segments: Pass) -> int:
    """Return a pass's peak, relative to its start."""
    level = peak = 0
    for segment in segments:
        peak = max(peak, level + segment.high)
        level += segment.change
    return peak


@dataclass(frozen=True)
class Passes:
    """A computation's forward and backward pass."""

    forward: Pass
    backward: Pass

    @property
    def activations(self) -> int:
        """Bytes saved by the forward pass for the backward pass."""
        return sum_changes(self.forward)


@dataclass(frozen=True)
class ModelPasses:
    """A whole model's passes. Gradients have the parameters' logical names."""

    first: Passes
    """The embedding."""
    layers: Sequence[Passes]
    last: Passes
    """Final norm, logits and loss."""
    names: Sequence[str]
    """Layer kinds, for people."""


EMBEDDINGS = "embeddings"
"""Name of the embeddings among a layer's parameters, if it calls a shared block. Their gradient is
summed over all calls."""
