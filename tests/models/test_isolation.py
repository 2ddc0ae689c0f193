"""A document in a packed batch has the same outputs and gradients as the document alone."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.models.documents import Documents
from headrace.models.model.model import Model
from headrace.models.operators import attention

ROWS, LENGTH = 3, 53
CUTS = [0, 1, 2, 9, 9, 40, 53, 53, 70, 86, 87, 105, 106, 159]
"""Lengths 1 and 2, at a chunk's edge and beyond it, a row of one document, repeated boundaries."""
BOUND = 1e-10


def batch() -> tuple[Tensor, Documents, list[tuple[int, int]]]:
    tokens = torch.randint(0, 23, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    documents = Documents.build(torch.tensor(CUTS, dtype=torch.int32), (ROWS, LENGTH))
    edges = sorted({*CUTS, *range(0, ROWS * LENGTH + 1, LENGTH)})
    return tokens, documents, list(pairwise(edges))


def packed_and_alone(model: Model) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    """Return logits and gradients of the packed batch, and of its documents one by one."""
    tokens, documents, spans = batch()
    probe = torch.randn(ROWS * LENGTH, 23, generator=torch.Generator().manual_seed(2)).double()
    packed = model(tokens, documents).flatten(0, 1)
    packed_gradients = torch.autograd.grad((packed * probe).sum(), list(model.parameters()))
    alone = torch.cat([model(tokens.flatten()[None, a:b])[0] for a, b in spans])
    alone_gradients = torch.autograd.grad((alone * probe).sum(), list(model.parameters()))
    return packed, alone, list(packed_gradients), list(alone_gradients)


def test_documents_do_not_see_each_other(tiny: Model) -> None:
    packed, alone, packed_gradients, alone_gradients = packed_and_alone(tiny)
    assert (packed - alone).abs().max() < BOUND
    for (name, _), packed_gradient, alone_gradient in zip(
        tiny.named_parameters(), packed_gradients, alone_gradients, strict=True
    ):
        assert (packed_gradient - alone_gradient).abs().max() < BOUND * max(
            1.0, float(alone_gradient.abs().max())
        ), name


@settings(max_examples=4)
@given(data=st.data())
def test_wherever_documents_begin(tiny: Model, data: st.DataObject) -> None:
    """Outputs and gradients, with boundaries anywhere, also repeated ones."""
    rows, length = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 21))
    cuts = sorted([0, rows * length, *data.draw(st.lists(st.integers(0, rows * length)))])
    tokens = torch.randint(0, 23, (rows, length), generator=torch.Generator().manual_seed(1))
    probe = torch.randn(rows * length, 23, generator=torch.Generator().manual_seed(2)).double()
    documents = Documents.build(torch.tensor(cuts), (rows, length))
    edges = sorted({*cuts, *range(0, rows * length + 1, length)})
    packed = tiny(tokens, documents).flatten(0, 1)
    alone = torch.cat([tiny(tokens.flatten()[None, a:b])[0] for a, b in pairwise(edges)])
    assert (packed - alone).abs().max() < BOUND
    parameters = list(tiny.parameters())
    gradients = (torch.autograd.grad((y * probe).sum(), parameters) for y in (packed, alone))
    for packed_gradient, alone_gradient in zip(*gradients, strict=True):
        assert (packed_gradient - alone_gradient).abs().max() < BOUND * max(
            1.0, float(alone_gradient.abs().max())
        )


def test_the_compiled_form_is_isolated_too(tiny: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, documents, _ = batch()
    by_rows = tiny(tokens, documents)
    monkeypatch.setattr(attention, "is_compiling", lambda: True)
    assert (tiny(tokens, documents) - by_rows).abs().max() < BOUND


def test_without_isolation_documents_see_each_other(tiny: Model) -> None:
    tokens, documents, _ = batch()
    apart = tiny(tokens, documents)
    tiny.config = dataclasses.replace(tiny.config, isolate_documents=False)
    together = tiny(tokens, documents)
    assert (apart - together).abs().max() > 1e-3
    assert torch.equal(together, tiny(tokens))


def test_a_missing_boundary_is_seen(tiny: Model) -> None:
    tokens, documents, _ = batch()
    cuts = torch.tensor([cut for cut in CUTS if cut != 40], dtype=torch.int32)
    merged = Documents.build(cuts, (ROWS, LENGTH))
    difference = (tiny(tokens, documents) - tiny(tokens, merged)).abs()
    assert difference[0, :40].max() < BOUND
    assert difference[0, 40:].max() > 1e-6
    assert difference[1:].max() < BOUND


def test_a_later_token_changes_nothing_before_it(tiny: Model) -> None:
    tokens, documents, _ = batch()
    for packed in (None, documents):
        before = tiny(tokens, packed)
        changed = tokens.clone()
        changed[:, 31] = (changed[:, 31] + 1) % 23
        difference = (tiny(changed, packed) - before).abs()
        assert difference[:, :31].max() < BOUND
        assert difference[:, 31].max() > 1e-3


def test_every_length(tiny: Model) -> None:
    tokens = torch.randint(0, 23, (1, 64), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        whole = tiny(tokens)
        for length in (1, 2, 7, 8, 9, 31, 33):
            assert (tiny(tokens[:, :length]) - whole[:, :length]).abs().max() < BOUND
