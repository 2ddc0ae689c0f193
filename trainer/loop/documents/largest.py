"""The pieces of documents with the largest losses, among all ranks' rows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....dataplane.runlog.document_losses import PieceLoss
from ...layout.groups import Parallel
from ..metrics import Combination

MAX_PIECES = 8
"""Pieces in a step's record."""
NUMBERS = len(PieceLoss._fields)


class LargestPieces(Combination):
    """The `MAX_PIECES` pieces with the largest losses, the largest first. A rank measures those of
    its rows."""

    size = NUMBERS * MAX_PIECES
    absent = -1.0

    def encode(self, measured: Sequence[PieceLoss]) -> list[float]:
        numbers = [float(number) for piece in measured for number in piece]
        return numbers + [self.absent] * (self.size - len(numbers))

    def combine(self, numbers: torch.Tensor, weight: float) -> list[PieceLoss] | None:
        pieces = numbers.reshape(-1, NUMBERS)
        listed = pieces[pieces[:, 0] != self.absent].tolist()
        return order_pieces(map(to_piece, listed))[:MAX_PIECES] or None


def to_piece(numbers: Sequence[float]) -> PieceLoss:
    row, first, loss, weight = numbers
    return PieceLoss(int(row), int(first), loss, weight)


def order_pieces(pieces: Iterable[PieceLoss]) -> list[PieceLoss]:
    """Sort pieces: those whose loss is not finite, then the largest losses first."""
    return sorted(pieces, key=lambda piece: (_rank(piece.loss), piece.row, piece.first))


def _rank(loss: float) -> float:
    return -loss if math.isfinite(loss) else -math.inf


def gather_pieces(pieces: Sequence[PieceLoss], parallel: Parallel) -> list[PieceLoss]:
    """Gather the pieces of all ranks that report rows, in order. Collective."""
    by_rank: list[Any] = [None] * parallel.world
    local = [tuple(piece) for piece in pieces] if parallel.reports_rows else []
    dist.all_gather_object(by_rank, local, group=parallel.control)
    return order_pieces(to_piece(numbers) for rank_pieces in by_rank for numbers in rank_pieces)
