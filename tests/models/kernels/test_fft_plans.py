"""Batches of Fourier transforms: cuFFT makes a plan for each size of a batch."""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.models.kernels.fft_convolution import _plan_transforms

LENGTH, WIDTH = 4096, 96


def plans(documents: int, taps: Tensor) -> set[tuple[int, int, int]]:
    """Return the shapes of the transforms of a row with this many short documents, and check that
    the transforms have room for all of them."""
    short = torch.arange(60).repeat(documents)
    positions = torch.cat([short, torch.arange(LENGTH - len(short))]).unsqueeze(0)
    shapes, held = set(), 0
    for batch in _plan_transforms(torch.empty(1, LENGTH, WIDTH), taps, positions):
        assert len(batch.document_begins) <= batch.num_transforms
        shapes.add((batch.num_transforms, batch.channels, batch.size))
        held += len(batch.document_begins) * batch.channels
    assert held == (documents + 1) * WIDTH
    return shapes


def test_plans_do_not_change_with_the_number_of_documents() -> None:
    taps = torch.zeros(WIDTH, 64)
    assert plans(41, taps) == plans(45, taps) == plans(48, taps)
    assert plans(48, taps) != plans(49, taps), "a negative control"
    every = [(places, size) for n in range(1, 65) for places, _, size in plans(n, taps)]
    assert len({places for places, size in every if size < 256}) == 20
    assert all(places < 1.25 * n for n in range(1, 65) for places, *_ in plans(n, taps) if n > 1)


def test_rows_of_one_document_have_no_unused_transforms() -> None:
    batches = _plan_transforms(torch.empty(9, LENGTH, WIDTH), torch.zeros(WIDTH, 64), None)
    assert all(batch.num_transforms == len(batch.document_begins) == 9 for batch in batches)
