"""Chunked scans equal the recurrences that define them."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from headrace.models.documents import Documents
from headrace.models.layers.convolution import causal_convolution
from headrace.models.layers.scan import modal_few, modal_scan, selective_scan, ssd

BOUND = 1e-11
LENGTHS = st.integers(1, 70)
CUTS = st.lists(st.integers(0, 140), max_size=6)
CHUNKS = st.sampled_from([1, 2, 7, 16, 32])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def documents_of(cuts: list[int], length: int) -> Documents:
    inside = sorted({0, 2 * length, *(cut % (2 * length + 1) for cut in cuts)})
    return Documents.build(torch.tensor(inside, dtype=torch.int32), (2, length))


def ssd_inputs(length: int) -> tuple[Tensor, ...]:
    dt = F.softplus(normal(2, length, 4, seed=2))
    A = -torch.tensor([0.5, 1.0, 4.0, 16.0], dtype=torch.float64)
    x, B, C = (
        normal(2, length, *rest, seed=seed)
        for rest, seed in (((4, 3), 1), ((2, 5), 3), ((2, 5), 4))
    )
    return x, dt, A, B, C


def ssd_by_definition(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, positions: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    y = torch.zeros_like(x)
    B, C = (t.repeat_interleave(2, dim=2) for t in (B, C))
    for t in range(x.shape[1]):
        state = state * (positions[:, t] > 0)[:, None, None, None]
        state = state * torch.exp(dt[:, t] * A)[..., None, None]
        state = state + (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None]
        y[:, t] = (state * C[:, t, :, None]).sum(-1)
    return y, state


@settings(max_examples=30, deadline=None)
@given(length=LENGTHS, cuts=CUTS, chunk=CHUNKS)
def test_ssd(length: int, cuts: list[int], chunk: int) -> None:
    inputs, state = ssd_inputs(length), normal(2, 4, 3, 5, seed=9)
    documents = documents_of(cuts, length)
    alone = torch.ones(2, length)
    alone[:, 0] = 0
    leading = (documents.positions == 0).cumsum(dim=1) == 1
    continued = Documents(documents.positions + 5 * leading)
    cases = (
        (None, None, alone, torch.zeros_like(state)),
        (documents, None, documents.positions, torch.zeros_like(state)),
        (None, state, torch.ones(2, length), state),
        (continued, state, continued.positions, state),
    )
    for packed, given_state, positions, start in cases:
        expected, last = ssd_by_definition(*inputs, positions, start)
        y, final = ssd(*inputs, packed, state=given_state, chunk=chunk)
        assert (y - expected).abs().max() < BOUND
        assert (final - last).abs().max() < BOUND


@settings(max_examples=30, deadline=None)
@given(length=LENGTHS, cuts=CUTS, chunk=CHUNKS)
def test_selective_scan(length: int, cuts: list[int], chunk: int) -> None:
    dt = F.softplus(normal(2, length, 2, 3, seed=2))
    A = -torch.exp(normal(2, 3, 5, seed=5))
    x, B, C = (normal(2, length, 2, n, seed=n) for n in (3, 5, 5))
    documents = documents_of(cuts, length)
    state = torch.zeros(2, 2, 3, 5, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for t in range(length):
        state = state * (documents.positions[:, t] > 0)[:, None, None, None]
        state = state * torch.exp(dt[:, t, ..., None] * A)
        state = state + (dt[:, t] * x[:, t])[..., None] * B[:, t, :, None]
        expected[:, t] = (state * C[:, t, :, None]).sum(-1)
    with torch.no_grad():
        y, final = selective_scan(x, dt, A, B, C, documents, chunk=chunk)
    assert (y - expected).abs().max() < BOUND
    assert (final - state).abs().max() < BOUND
    kept, _ = selective_scan(x.requires_grad_(), dt, A, B, C, documents, chunk=chunk)
    assert torch.equal(kept, y)


@settings(max_examples=30, deadline=None)
@given(length=LENGTHS, cuts=CUTS, chunk=CHUNKS, oscillating=st.booleans())
def test_modal_scan_is_the_convolution(
    length: int, cuts: list[int], chunk: int, oscillating: bool
) -> None:
    x = normal(2, length, 3)
    rates, residues = torch.exp(normal(3, 4, seed=1) - 2), normal(3, 4, seed=2)
    if oscillating:
        rates = torch.complex(rates, normal(3, 4, seed=3))
        residues = torch.complex(residues, normal(3, 4, seed=4))
    time = torch.arange(length)
    taps = (residues.unsqueeze(-1) * torch.exp(-rates.unsqueeze(-1) * time)).sum(1)
    taps = taps.real if oscillating else taps
    documents = documents_of(cuts, length)
    for packed in (None, documents):
        y, _ = modal_scan(x, rates, residues, packed, chunk=chunk)
        for form in ("fft", "toeplitz", "direct"):
            expected = causal_convolution(x, taps, packed, method=form)  # type: ignore[arg-type]
            assert (y - expected).abs().max() < BOUND
    # The state after any part of a row continues it.
    cut = (length + 1) // 2
    if cut < length:
        first = Documents(documents.positions[:, :cut])
        later = Documents(documents.positions[:, cut:])
        _, state = modal_scan(x[:, :cut], rates, residues, first, chunk=chunk)
        z, _ = modal_scan(x[:, cut:], rates, residues, later, state=state, chunk=chunk)
        assert (z - y[:, cut:]).abs().max() < BOUND
        for packed, start in ((later, state), (None, state), (later, None), (None, None)):
            positions = packed.positions if packed is not None else None
            chunked = modal_scan(x[:, cut:], rates, residues, packed, state=start, chunk=chunk)
            result = modal_few(x[:, cut:], rates, residues, positions, state=start)
            for few, many in zip(result, chunked, strict=True):
                assert (few - many).abs().max() < BOUND


def test_gradients_cross_a_cut() -> None:
    """As under context parallelism: the previous part's last inputs or state, and gradients."""
    cut, documents = 23, documents_of([9, 20, 70], 40)
    first, later = (Documents(p) for p in documents.positions.split([cut, 40 - cut], dim=1))
    probe = normal(2, 40, 4, 3, seed=8)
    inputs = [t.requires_grad_() for t in ssd_inputs(40)]
    whole, _ = ssd(*inputs, documents)  # type: ignore[arg-type]
    expected = torch.autograd.grad((whole * probe).sum(), inputs)
    x, dt, A, B, C = inputs
    y, state = ssd(x[:, :cut], dt[:, :cut], A, B[:, :cut], C[:, :cut], first)
    z, _ = ssd(x[:, cut:], dt[:, cut:], A, B[:, cut:], C[:, cut:], later, state=state)
    got = torch.autograd.grad((torch.cat([y, z], 1) * probe).sum(), inputs)
    assert all((a - b).abs().max() < BOUND for a, b in zip(got, expected, strict=True))

    x, rates, residues = normal(2, 40, 3), torch.exp(normal(3, 4, seed=1)), normal(3, 4, seed=2)
    taps, probe = normal(3, 12, seed=3), normal(2, 40, 3, seed=8)
    leaves = [t.requires_grad_() for t in (x, rates, residues, taps)]
    both = modal_scan(x, rates, residues, documents)[0] + causal_convolution(x, taps, documents)
    expected = torch.autograd.grad((both * probe).sum(), leaves)
    y, modes = modal_scan(x[:, :cut], rates, residues, first)
    z, _ = modal_scan(x[:, cut:], rates, residues, later, state=modes)
    halo = x[:, cut - 11 : cut]
    y = y + causal_convolution(x[:, :cut], taps, first)
    z = z + causal_convolution(x[:, cut:], taps, later, history=halo)
    got = torch.autograd.grad((torch.cat([y, z], 1) * probe).sum(), leaves)
    assert all((a - b).abs().max() < BOUND for a, b in zip(got, expected, strict=True))


def test_a_missing_reset_is_seen() -> None:
    inputs, documents = ssd_inputs(40), documents_of([13, 57], 40)
    apart, _ = ssd(*inputs, documents)
    together, _ = ssd(*inputs, None)
    assert (apart[0, :13] - together[0, :13]).abs().max() < BOUND
    assert (apart[0, 13:16] - together[0, 13:16]).abs().max() > 1e-3


def test_gradients_by_finite_differences() -> None:
    documents = documents_of([3, 4, 9], 7)
    x, dt, A, B, C = (t.requires_grad_() for t in ssd_inputs(7))

    def run(*inputs: Tensor) -> Tensor:
        y, state = ssd(*inputs, documents, chunk=4)  # type: ignore[arg-type]
        return torch.cat([y.flatten(), state.flatten()])

    assert torch.autograd.gradcheck(run, (x, dt, A, B, C))

    def scan(x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        y, state = selective_scan(x, dt, A, B, C, documents, chunk=4)
        return torch.cat([y.flatten(), state.flatten()])

    A = -torch.exp(normal(2, 2, 3, seed=5))
    inputs = (normal(2, 7, 2, 2), F.softplus(normal(2, 7, 2, 2, seed=1)), A)
    inputs += (normal(2, 7, 2, 3, seed=3), normal(2, 7, 2, 3, seed=4))
    assert torch.autograd.gradcheck(scan, tuple(t.requires_grad_() for t in inputs))

    def modal(x: Tensor, rates: Tensor, residues: Tensor) -> Tensor:
        y, state = modal_scan(x, rates, residues, documents, chunk=4)
        assert state is not None
        return torch.cat([y.flatten(), state.flatten()])

    parts = (normal(2, 7, 2), torch.exp(normal(2, 3, seed=1)), normal(2, 3, seed=2))
    assert torch.autograd.gradcheck(modal, tuple(t.requires_grad_() for t in parts))


def test_far_decays_do_not_overflow() -> None:
    x, dt, A, B, C = (t.float() for t in ssd_inputs(64))
    y, state = ssd(x, dt * 100, A * 100, B, C, chunk=64)
    assert y.isfinite().all() and state.isfinite().all()
