"""Passes of a computation in pieces: its memory over time, in bytes.

A piece of a backward pass ends where the gradient of a parameter is complete: how long the gradient
lives is the engine's matter, so it counts until the end of its piece and not longer. Passes of
neighbouring layers follow each other: the level at the end of one is that at the start of the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Piece:
    """A part of a pass, in bytes."""

    high: int
    """Highest level, above that at the start of the piece."""
    change: int
    """Level at the end, above that at the start."""
    gradient: str = ""
    """Parameter whose gradient is complete at the end, or empty."""
    size: int = 0
    """Bytes of that gradient: not in `change`, and in `high`."""


Pass = tuple[Piece, ...]


def change(pieces: Pass) -> int:
    """Return the change of the level over a pass."""
    return sum(piece.change for piece in pieces)


def high(pieces: Pass) -> int:
    """Return the highest level of a pass, above that at its start."""
    level = most = 0
    for piece in pieces:
        most = max(most, level + piece.high)
        level += piece.change
    return most


@dataclass(frozen=True)
class Passes:
    """Both passes of a computation."""

    forward: Pass
    backward: Pass

    @property
    def kept(self) -> int:
        """Bytes that stay from the forward to the backward pass."""
        return change(self.forward)


@dataclass(frozen=True)
class ModelPasses:
    """Passes of all parts of a model. Gradients have the parameters' logical names."""

    first: Passes
    """The embedding."""
    layers: Sequence[Passes]
    last: Passes
    """Final norm, logits and loss."""
    names: Sequence[str]
    """Sort of each layer, for people."""


EMBEDDINGS = "embeddings"
"""Name of the embeddings among the parameters of a layer that calls a shared block: their gradient
is the sum of those of all calls."""
