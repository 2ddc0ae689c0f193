"""Losses by document: the same in every layout as token by token in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from headrace.dataplane.runlog.document_losses import PieceLoss
from headrace.trainer.loop.documents.largest import LargestPieces


def check_pieces(pieces: dict[str, Any]) -> None:
    sums_of_one_rank = pieces.pop("one")
    largest = sorted(sums_of_one_rank, key=lambda place: -sums_of_one_rank[place][0])[:8]
    for words, (recorded, everything) in pieces.items():
        assert [(piece.row, piece.first) for piece in recorded] == largest, words
        assert len(everything) == len(sums_of_one_rank), words
        for piece in everything:
            sums = sums_of_one_rank[piece.row, piece.first]
            assert (piece.loss, piece.weight) == pytest.approx(sums, rel=1e-6), (words, piece)


def test_documents_lose_in_every_layout_what_they_lose_in_one_process(in_processes: Any) -> None:
    """Rows cut by context and tensor ranks, shared by data ranks, and micro-batches of a pipeline;
    a document without weight is not listed."""
    layouts = ["", "cp2", "tp2", "pp2"]
    check_pieces(in_processes(2, "document_sums.by_layout", layouts=layouts, model="tiny"))


@pytest.mark.slow
def test_documents_lose_the_same_where_both_axes_cut_rows(in_processes: Any) -> None:
    layouts = ["tp2-cp2ring", "pp2-cp2", "pp2-tp2"]
    check_pieces(in_processes(4, "document_sums.by_layout", layouts=layouts, model="tiny"))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["cp2", "tp2"])
def test_the_sums_of_a_rank_alone_are_wrong(in_processes: Any, layout: str) -> None:
    """Negative control."""
    with pytest.raises(AssertionError):
        check_pieces(in_processes(2, "document_sums.of_one_rank", layouts=[layout], model="tiny"))


def test_the_largest_pieces_of_all_ranks_are_those_of_the_step() -> None:
    """A loss that is not finite comes first; ties are in the order of rows."""
    combination = LargestPieces()
    ranks = [
        [PieceLoss(3 * n + rank, 7, float(loss), 2.0) for n, loss in enumerate((9, 5, 5, 1))]
        for rank in range(3)
    ]
    ranks[1].append(PieceLoss(99, 0, math.nan, 1.0))
    message = torch.tensor([combination.encode(rank) for rank in ranks], dtype=torch.float64)
    first, *pieces = combination.combine(message, 1.0) or []
    assert first.row == 99 and math.isnan(first.loss)
    assert [piece.row for piece in pieces] == [0, 1, 2, 3, 4, 5, 6]
    assert combination.combine(message[:0].new_full((3, combination.size), -1.0), 1.0) is None
