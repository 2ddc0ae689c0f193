"""Recurrent steps with constant-size states and a KV cache equal the full forward pass."""

from __future__ import annotations

import pytest
import torch

from headrace.models.documents import Documents
from headrace.models.model import Model

BOUND = 1e-10


def tokens_of(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 23, (rows, length), generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize("pieces", [[1] * 41, [40, 1], [13, 1, 1, 17, 9]])
def test_pieces_equal_the_whole(tiny: Model, pieces: list[int]) -> None:
    tokens = tokens_of(2, 41)
    states = tiny.new_states(41)
    with torch.no_grad():
        parts = [tiny(part, states=states) for part in tokens.split(pieces, dim=1)]
        assert (torch.cat(parts, dim=1) - tiny(tokens)).abs().max() < BOUND


def test_a_document_may_begin_anywhere(tiny: Model) -> None:
    tokens = tokens_of(2, 41)
    cuts = torch.tensor([0, 11, 41, 47, 48, 82], dtype=torch.int32)
    documents = Documents.from_cu_seqlens(cuts, (2, 41))
    states = tiny.new_states(41)
    with torch.no_grad():
        parts = [
            tiny(part, Documents(positions), states=states)
            for part, positions in zip(
                tokens.split([7, 19, 1, 14], dim=1),
                documents.positions.split([7, 19, 1, 14], dim=1),
                strict=True,
            )
        ]
        assert (torch.cat(parts, dim=1) - tiny(tokens, documents)).abs().max() < BOUND


def test_a_lost_state_is_seen(tiny: Model) -> None:
    tokens = tokens_of(2, 20)
    states = tiny.new_states(20)
    with torch.no_grad():
        tiny(tokens[:, :19], states=states)
        for own in states:
            for state in own:
                for tensor in state.tensors.values():
                    tensor.zero_()
        last = tiny(tokens[:, 19:], states=states)
        assert (last - tiny(tokens)[:, 19:]).abs().max() > 1e-4
