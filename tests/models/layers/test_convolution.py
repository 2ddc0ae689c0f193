"""All forms of the convolution equal the sum that defines it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.models.documents import Documents
from headrace.models.layers.convolution import FORMS, causal_convolution, choose_form, next_history

BOUND = 1e-12


def by_definition(x: Tensor, taps: Tensor, positions: Tensor) -> Tensor:
    rows, length, width = x.shape
    filters = taps.repeat_interleave(width // taps.shape[0], dim=0)
    y = torch.zeros_like(x)
    for row in range(rows):
        for t in range(length):
            for back in range(min(int(positions[row, t]), t, taps.shape[1] - 1) + 1):
                y[row, t] += filters[:, back] * x[row, t - back]
    return y


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def documents_of(cuts: list[int], rows: int, length: int) -> Documents:
    inside = sorted({0, rows * length, *(cut % (rows * length + 1) for cut in cuts)})
    return Documents.build(torch.tensor(inside, dtype=torch.int32), (rows, length))


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 90),
    reach=st.integers(1, 80),
    groups=st.sampled_from([1, 2, 4]),
    cuts=st.lists(st.integers(0, 300), max_size=8),
)
def test_every_form_is_the_definition(
    rows: int, length: int, reach: int, groups: int, cuts: list[int]
) -> None:
    x, taps = normal(rows, length, 4), normal(groups, reach, seed=1)
    documents = documents_of(cuts, rows, length)
    column = torch.arange(length).expand(rows, -1)
    for packed, positions in ((None, column), (documents, documents.positions)):
        expected = by_definition(x, taps, positions)
        for form in FORMS:
            y = causal_convolution(x, taps, packed, method=form)  # type: ignore[arg-type]
            assert (y - expected).abs().max() < BOUND, form


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(2, 70),
    cut=st.integers(1, 69),
    reach=st.integers(1, 40),
    cuts=st.lists(st.integers(0, 200), max_size=6),
)
def test_history_continues_a_row(length: int, cut: int, reach: int, cuts: list[int]) -> None:
    cut = min(cut, length - 1)
    x, taps = normal(2, length, 4), normal(2, reach, seed=1)
    documents = documents_of(cuts, 2, length)
    halo = next_history(x[:, :cut], None, reach)
    later = Documents(documents.positions[:, cut:])
    for whole, part in ((None, None), (documents, later)):
        expected = causal_convolution(x, taps, whole)[:, cut:]
        for form in FORMS:
            y = causal_convolution(x[:, cut:], taps, part, history=halo, method=form)  # type: ignore[arg-type]
            assert (y - expected).abs().max() < BOUND, form


@pytest.mark.parametrize("form", FORMS)
def test_a_reversed_filter_gives_another_result(form: str) -> None:
    x, taps = normal(1, 40, 2), normal(2, 9, seed=1)
    y = causal_convolution(x, taps, method=form)  # type: ignore[arg-type]
    reversed_y = causal_convolution(x, taps.flip(-1), method=form)  # type: ignore[arg-type]
    assert (y - reversed_y).abs().max() > 0.1


@pytest.mark.parametrize("form", FORMS)
def test_gradients_by_finite_differences(form: str) -> None:
    x, taps = normal(2, 9, 4).requires_grad_(), normal(2, 5, seed=1).requires_grad_()
    documents = documents_of([3, 4, 12], 2, 9)

    def run(x: Tensor, taps: Tensor) -> Tensor:
        return causal_convolution(x, taps, documents, method=form)  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(run, (x, taps))


@pytest.mark.parametrize("form", FORMS)
def test_bf16_is_rounded_once(form: str) -> None:
    x, taps = normal(1, 200, 4).bfloat16(), normal(2, 100, seed=1).bfloat16()
    exact = causal_convolution(x.double(), taps.double(), method=form)  # type: ignore[arg-type]
    y = causal_convolution(x, taps, method=form)  # type: ignore[arg-type]
    assert y.dtype == torch.bfloat16
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + 1e-4).all()


def test_the_form_follows_the_filter() -> None:
    assert choose_form(7, 4096, outputs=4096) == "direct"
    assert choose_form(128, 4096, outputs=4096) == "toeplitz"
    assert choose_form(8192, 8192, outputs=8192) == "fft"
    assert choose_form(128, 128, outputs=1) == "direct"
