"""Turn an engine's pieces, the ranges of parameters that a rank updates, into fragments.

Fragments of masters, optimizer states and gradients have the same ranges, in the engine's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from ...models.parallel.local_shard import LocalShard
from ..checkpoints.fragments import Fragment
from ..checkpoints.kinds import AVERAGE, MASTER, tensor_key
from .optimizers.base import Optimizer, ParameterGroup

GRADIENT = "gradient"


class Piece(NamedTuple):
    """A range of this rank's local shard of a parameter."""

    parameter: str
    tensor: Tensor
    """The tensor that the optimizer updates: the parameter, or a flat tensor of several."""
    begin: int
    """First element of the range in the memory of `tensor`."""
    start: int
    """First element of the range in the local shard, in row-major order."""
    numel: int
    writes: bool
    """True on the rank that stores the range and counts it in the norm."""


class Pieces:
    """Builds fragments from an engine's pieces."""

    def __init__(
        self,
        optimizer: Optimizer,
        shards: Mapping[str, LocalShard],
        groups: Iterable[ParameterGroup],
        *,
        averaged: bool,
    ) -> None:
        """`averaged` says whether masters have moving averages."""
        self.optimizer = optimizer
        self.averaged = averaged
        self.shards = shards
        self.states = {name: group.states for group in groups for name in group.names}

    def fragments(self, pieces: Iterable[Piece]) -> list[Fragment]:
        """Return fragments of the masters and optimizer states."""
        fragments = []
        for piece in pieces:
            states = self.optimizer.state_tensors(piece.tensor, self.states[piece.parameter])
            if self.averaged:
                states |= self.optimizer.state_tensors(piece.tensor, (AVERAGE,))
            for kind, tensor in {MASTER: piece.tensor, **states}.items():
                flat = local(tensor).view(-1).narrow(0, piece.begin, piece.numel)
                fragments.append(self._fragment(kind, piece, flat))
        return fragments

    def gradients(self, pieces: Iterable[Piece], flat: Iterable[Tensor]) -> list[Fragment]:
        """Return fragments of the gradients, from a flat gradient for each piece."""
        pairs = zip(pieces, flat, strict=True)
        return [self._fragment(GRADIENT, piece, gradient) for piece, gradient in pairs]

    def _fragment(self, kind: str, piece: Piece, data: Tensor) -> Fragment:
        shard = self.shards[piece.parameter]
        return Fragment(
            key=tensor_key(kind, piece.parameter),
            shard=shard,
            start=piece.start,
            data=data,
            writes=piece.writes and shard.stored,
        )


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, which may be sharded."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
