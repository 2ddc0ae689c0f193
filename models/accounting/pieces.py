"""Forward and backward passes as segments: memory over time, in bytes.

A segment of a backward pass ends where the gradient of a parameter is complete. The engine decides
how long that gradient lives, so the gradient counts to the end of its segment only. Passes of
adjacent layers are contiguous: the level at the end of a pass is the level at the start of the
next.
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
    """Bytes of that gradient: included in `high`, but not in `change`."""


Pass = tuple[PassSegment, ...]


def sum_changes(segments: Pass) -> int:
    """Return the level at the end of a pass, relative to its start."""
    return sum(segment.change for segment in segments)


def find_peak(segments: Pass) -> int:
    """Return the peak of a pass, relative to the level at its start."""
    level = peak = 0
    for segment in segments:
        peak = max(peak, level + segment.high)
        level += segment.change
    return peak


@dataclass(frozen=True)
class Passes:
    """Forward and backward pass of a computation."""

    forward: Pass
    backward: Pass

    @property
    def activations(self) -> int:
        """Bytes saved by the forward pass for the backward pass."""
        return sum_changes(self.forward)


@dataclass(frozen=True)
class ModelPasses:
    """Passes of a whole model. Gradients have the parameters' logical names."""

    first: Passes
    """The embedding."""
    layers: Sequence[Passes]
    last: Passes
    """Final norm, logits and loss."""
    names: Sequence[str]
    """Kind of each layer, for people."""


EMBEDDINGS = "embeddings"
"""Name of the embeddings among the parameters of a layer that calls a shared block. Their gradient
is summed over all calls."""
