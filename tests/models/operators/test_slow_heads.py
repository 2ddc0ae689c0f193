"""Slow heads: outer products of keys and values, filtered, and summed by the queries."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.kernels.operator_checks import (
    context,
    convolved,
    documents_matter,
    is_its_definition,
    is_seen,
    make,
    normal,
    rounds_to,
)
from torch import Tensor

GROUPS = 2
"""Heads of four channels, at width 8."""


def explicit(hyena: Any, t: int) -> Tensor:
    return hyena.taps[:, t] if t < hyena.options.taps else torch.zeros(GROUPS).double()


def modal(hyena: Any, t: int) -> Tensor:
    total: Tensor = (hyena.residues * torch.exp(-hyena.rates.exp() * t)).sum(-1)
    return total


def factored(hyena: Any, t: int) -> Tensor:
    stretched = t * hyena.options.filter_horizon / (hyena.options.filter_horizon - 1)
    rates = hyena.steps.clamp(0.001, 0.1) * hyena.poles.prod(-1).exp()
    total: Tensor = (hyena.residues.prod(-1) * torch.exp(-rates * stretched)).sum(-1)
    return total


def s4d(hyena: Any, t: int) -> Tensor:
    step = hyena.steps.exp()[:, None]
    poles = step * (-hyena.rates.exp() + 1j * hyena.angles)
    weights = (hyena.inputs + 1j * hyena.inputs_i) * (hyena.residues + 1j * hyena.residues_i)
    total: Tensor = (step * weights / (1 - poles / 2) * torch.exp(poles * t)).sum(-1)
    return 2 * total.real


def free_form(hyena: Any, t: int) -> Tensor:
    """Three features of time, no inner layer, a learned decay."""
    horizon = hyena.options.filter_horizon
    if t >= horizon:
        return torch.zeros(GROUPS).double()
    time, angle = t / (horizon - 1), 2 * math.pi * t / horizon * 1e-4
    features = torch.tensor([time, math.cos(angle), -math.sin(angle)], dtype=torch.float64)
    (layer,) = hyena.layers
    hidden = torch.sin(hyena.frequency * (layer.weight @ features + layer.bias))
    taps: Tensor = (hyena.last.weight @ hidden) * torch.exp(-time * hyena.decay.abs())
    return taps


KINDS: dict[str, tuple[Callable[[Any, int], Tensor], dict[str, Any]]] = {
    "hyena-mr": (explicit, {"taps": 20, "decay": "none"}),
    "hyena-li": (modal, {"state_size": 3, "chunk": 8}),
    "hyena-li-factored": (factored, {"state_size": 2, "chunk": 8}),
    "hyena-li-s4d": (s4d, {"state_size": 2, "chunk": 8}),
    "hyena-li-freeform": (
        free_form,
        {"filter_horizon": 20, "features": 3, "inner_layers": 0, "learned_decay": True},
    ),
}


def definition(hyena: Any, u: Tensor) -> Tensor:
    """Linear attention: the token j places back weighs h_j, and this token d more."""
    filters = KINDS[hyena.options.kind][0]
    z = convolved(u @ hyena.qkv.weight.T, hyena.featurizer.taps)
    q, k, v = (item.view(len(u), GROUPS, -1) for item in z.chunk(3, dim=-1))
    y = torch.zeros_like(q)
    for t in range(len(u)):
        for back in range(t + 1):
            weight = filters(hyena, back) + (hyena.skip if back == 0 else 0)
            score = (q[t] * k[t - back]).sum(-1)
            y[t] += (weight * score)[:, None] * v[t - back]
    out: Tensor = hyena.output(y.flatten(1))
    return out


def heads(kind: str, **more: Any) -> Any:
    return make(kind, groups=GROUPS, slow_heads=True, **KINDS[kind][1], **more)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_linear_attention_with_its_filter(kind: str) -> None:
    is_its_definition(heads(kind), definition)


@pytest.mark.parametrize("kind", ["hyena-mr", "hyena-li"])
def test_the_form_of_the_convolution_does_not_matter(kind: str) -> None:
    is_its_definition(heads(kind, method="fft"), definition)


def test_changes_are_seen() -> None:
    hyena = heads("hyena-li")

    def swap_keys_and_values(changed: Any) -> None:
        changed.qkv.weight[8:] = changed.qkv.weight[8:].roll(8, dims=0)

    def swap_the_heads(changed: Any) -> None:
        changed.residues[:] = changed.residues.flip(0)

    def shift_the_channels(changed: Any) -> None:
        changed.qkv.weight[:8] = changed.qkv.weight[:8].roll(1, dims=0)

    def drop_the_skip(changed: Any) -> None:
        changed.skip.zero_()

    for change in (swap_keys_and_values, swap_the_heads, shift_the_channels, drop_the_skip):
        is_seen(hyena, definition, change)
    documents_matter(hyena, definition)


def test_heads_of_one_channel_are_gates() -> None:
    """As many heads as channels compute what the operator without heads computes."""
    plain, single = (make("hyena-li", state_size=3, slow_heads=slow) for slow in (False, True))
    assert {n: p.shape for n, p in plain.named_parameters()} == {
        n: p.shape for n, p in single.named_parameters()
    }
    u = normal(2, 20, 8)
    assert torch.allclose(plain(u, context(2, 20)), single(u, context(2, 20)), atol=1e-12)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "hyena-mr"])
def test_a_shared_filter_is_a_filter_of_each_of_its_channels(kind: str) -> None:
    shared, by_channel = (make(kind, groups=groups, **KINDS[kind][1]) for groups in (GROUPS, None))
    for (name, few), many in zip(shared.named_parameters(), by_channel.parameters(), strict=True):
        differ = [n for n, (a, b) in enumerate(zip(few.shape, many.shape, strict=True)) if a != b]
        for dim in differ:
            few = few.repeat_interleave(8 // GROUPS, dim)
        assert not differ or name not in ("skip", "output.weight")
        many.data = few.data
    u = normal(2, 37, 8)
    cuts = (0, 5, 37)
    assert torch.allclose(
        shared(u, context(2, 37, cuts)), by_channel(u, context(2, 37, cuts)), atol=1e-12
    )


def test_in_bf16() -> None:
    rounds_to(heads("hyena-li"), 0.03)
