"""The chunked delta rule equals the recurrence that defines it, and fla's plain implementations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.models.peers import in_fp64, naive_fla
from torch import Tensor
from torch.nn import functional as F

from headrace.models.documents import Documents
from headrace.models.layers.delta.rule import delta_rule, recurrent_delta_rule
from headrace.models.layers.delta.scan import delta_scan, normalize

BOUND = 1e-11
HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 2, 4, 5, 3


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs_of(length: int, decays: int, strength: float = 1.0) -> tuple[Tensor, ...]:
    q, k = (normal(2, length, HEADS, KEY_DIM, seed=seed) for seed in (1, 2))
    v = normal(2, length, VALUE_HEADS, VALUE_DIM, seed=3)
    g = -strength * F.softplus(normal(2, length, VALUE_HEADS, decays, seed=4))
    return q, normalize(k), v, g, 2 * torch.sigmoid(normal(2, length, VALUE_HEADS, seed=5))


def documents_of(cuts: list[int], length: int) -> Documents:
    edges = sorted({0, 2 * length, *(cut % (2 * length + 1) for cut in cuts)})
    return Documents.build(torch.tensor(edges), (2, length))


def max_difference(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


@settings(max_examples=40, deadline=None)
@given(
    length=st.integers(1, 70),
    cuts=st.lists(st.integers(0, 140), max_size=6),
    chunk=st.sampled_from([1, 2, 7, 16, 20, 64]),
    decays=st.sampled_from([1, KEY_DIM]),
)
def test_chunks_equal_the_recurrence(length: int, cuts: list[int], chunk: int, decays: int) -> None:
    inputs, state = inputs_of(length, decays), normal(2, VALUE_HEADS, KEY_DIM, VALUE_DIM, seed=9)
    documents = documents_of(cuts, length)
    leading = (documents.positions == 0).cumsum(dim=1) == 1
    continued = Documents(documents.positions + 5 * leading)
    for packed, entering in ((None, None), (None, state), (documents, None), (continued, state)):
        ours = delta_rule(*inputs, packed, state=entering, chunk=chunk)  # type: ignore[arg-type]
        expected = recurrent_delta_rule(*inputs, packed, state=entering)  # type: ignore[arg-type]
        assert max_difference(ours, expected) < BOUND


@pytest.mark.parametrize("decays", [1, KEY_DIM])
def test_a_missing_reset_is_seen(decays: int) -> None:
    inputs, documents = inputs_of(40, decays), documents_of([13, 57], 40)
    isolated, _ = delta_rule(*inputs, documents, chunk=16)  # type: ignore[arg-type]
    together, _ = delta_rule(*inputs, chunk=16)  # type: ignore[arg-type]
    difference = (isolated - together).abs()[0]
    assert difference[:13].max() < BOUND
    assert difference[13:16].max() > 1e-3


@pytest.mark.parametrize("decays", [1, KEY_DIM])
def test_gradients_by_finite_differences(decays: int) -> None:
    documents = documents_of([3, 4, 9], 7)
    state = normal(2, VALUE_HEADS, KEY_DIM, VALUE_DIM, seed=9)
    continued = Documents(documents.positions + 5 * ((documents.positions == 0).cumsum(1) == 1))

    def run(*inputs: Tensor) -> Tensor:
        y, final = delta_rule(*inputs[:-1], continued, state=inputs[-1], chunk=4)  # type: ignore[arg-type]
        return torch.cat([y.flatten(), final.flatten()])

    leaves = tuple(x.requires_grad_() for x in (*inputs_of(7, decays), state))
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("decays", [1, KEY_DIM])
def test_strong_decays_do_not_overflow(decays: int) -> None:
    inputs = [x.float().requires_grad_() for x in inputs_of(64, decays, strength=300.0)]
    y, state = delta_rule(*inputs, chunk=64)  # type: ignore[arg-type]
    gradients = torch.autograd.grad(y.sum() + state.sum(), inputs)
    assert all(x.isfinite().all() for x in (y, state, *gradients))


@pytest.mark.parametrize("decays", [1, KEY_DIM])
def test_bf16_rounds_the_output_alone(decays: int) -> None:
    """Norms, decays, β, scores and states of inputs in bf16 are those of the same numbers in
    fp32."""
    widths = (2 * HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM, VALUE_HEADS * decays, VALUE_HEADS)
    half = [normal(2, 40, width, seed=width).bfloat16() for width in widths]
    rates = [normal(VALUE_HEADS).float(), normal(VALUE_HEADS * decays, seed=1).float()]
    documents = documents_of([17, 40], 40)
    y, exact = (
        delta_scan(*inputs, *rates, documents, key_head_dim=KEY_DIM, value_head_dim=VALUE_DIM)[0]
        for inputs in (half, [x.float() for x in half])
    )
    assert exact.dtype == torch.float32
    assert torch.equal(y, exact.bfloat16())


# fla


def gated_delta_net(
    form: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> Any:
    q, k = (x.repeat_interleave(VALUE_HEADS // HEADS, dim=2) for x in (q, k))
    function = getattr(naive_fla("gated_delta_rule"), f"naive_{form}_gated_delta_rule")
    return in_fp64(function, q=q, k=k, v=v, g=g.squeeze(-1), beta=beta, **options)


def kimi_delta_attention(
    form: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **options: Any
) -> Any:
    function = getattr(naive_fla("kda"), f"naive_{form}_kda")
    return in_fp64(function, q, k, v, g, beta, **options)


@pytest.mark.parametrize("form", ["recurrent", "chunk"])
@pytest.mark.parametrize(
    ("published", "decays"), [(gated_delta_net, 1), (kimi_delta_attention, KEY_DIM)]
)
def test_equals_fla(published: Callable[..., Any], decays: int, form: str) -> None:
    """Outputs, the final state, and the gradients of every input and of the initial state."""
    state = normal(2, VALUE_HEADS, KEY_DIM, VALUE_DIM, seed=9)
    leaves = [x.requires_grad_() for x in (*inputs_of(32, decays), state)]
    *inputs, entering = leaves
    options: dict[str, Any] = {"chunk_size": 16} if form == "chunk" else {}
    theirs = published(
        form, *inputs, scale=1.0, initial_state=entering, output_final_state=True, **options
    )
    ours = delta_rule(*inputs, state=entering, chunk=16)  # type: ignore[arg-type]
    probes = normal(*ours[0].shape, seed=10), normal(*ours[1].shape, seed=11)
    results = []
    for outputs in (ours, theirs):
        total = sum((y * probe).sum() for y, probe in zip(outputs, probes, strict=True))
        results.append((*outputs, *torch.autograd.grad(total, leaves)))
    assert max_difference(*results) < BOUND
