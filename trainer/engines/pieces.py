"""Turn an engine's pieces, the parameter ranges that a rank updates, into fragments.

Fragments for masters, optimizer states and gradients have the same ranges, in the engine's memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ...models.parallel.local_shard import LocalShard
from ..checkpoints.fragments import Fragment
from ..checkpoints.kinds import AVERAGE, MASTER, tensor_key
from .optimizers.base import Optimizer, ParameterGroup

GRADIENT = "gradient"


class ParameterPiece(NamedTuple):
    """A range in this rank's local shard of a parameter."""

    parameter: str
    tensor: Tensor
    """The tensor that the optimizer updates: the parameter, or a flat tensor with several."""
    begin: int
    """First element in the memory of `tensor`."""
    start: int
    """First element in the local shard, in row-major order."""
    numel: int
    writes: bool
    """True on the rank that stores the range and counts it in the norm."""


class FragmentBuilder:
    """Builds fragments from an engine's pieces."""

    def __init__(
        self,
        optimizer: Optimizer,
        shards: Mapping[str, LocalShard],
        groups: Iterable[ParameterGroup],
        *,
        averaged: bool,
    ) -> None:
        """`averaged`: masters have moving averages."""
        self.optimizer = optimizer
        self.averaged = averaged
        self.shards = shards
        self.states = {parameter: group.states for group in groups for parameter in group.names}
        self.pieces: Sequence[ParameterPiece] = ()
        self.ranges: list[Fragment] = []
        """Fragments of gradients for these pieces, without data."""

    def fragments(self, pieces: Iterable[ParameterPiece]) -> list[Fragment]:
        """Return fragments for masters and optimizer states."""
        fragments = []
        for piece in pieces:
            states = self.optimizer.state_tensors(piece.tensor, self.states[piece.parameter])
            if self.averaged:
                states |= self.optimizer.state_tensors(piece.tensor, (AVERAGE,))
            for kind, tensor in {MASTER: piece.tensor, **states}.items():
                flat = local(tensor).view(-1).narrow(0, piece.begin, piece.numel)
                fragments.append(self._fragment(kind, piece, flat))
        return fragments

    def gradients(self, pieces: Sequence[ParameterPiece], flat: Iterable[Tensor]) -> list[Fragment]:
        """Return fragments for gradients, from a flat gradient per piece. They are cheaper if
        `pieces` is the list of the last call."""
        if pieces is not self.pieces:
            empty = torch.empty(0)  # the memory of these gradients must not be kept
            self.pieces = pieces
            self.ranges = [self._fragment(GRADIENT, piece, empty) for piece in pieces]
        pairs = zip(self.ranges, flat, strict=True)
        return [fragment.with_data(gradient) for fragment, gradient in pairs]

    def _fragment(self, kind: str, piece: ParameterPiece, data: Tensor) -> Fragment:
        shard = self.shards[piece.parameter]
        return Fragment(
            key=tensor_key(kind, piece.parameter),
            shard=shard,
            start=piece.start,
            data=data,
            writes=piece.writes and shard.stored,
        )


def local(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor; plain tensors pass through."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
