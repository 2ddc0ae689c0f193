from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels.operator_checks import (
    convolved,
    documents_matter,
    is_its_definition,
    is_seen,
    make,
    rounds_to,
)
from torch import Tensor
from torch.nn import functional as F


def definition(mamba: Any, u: Tensor) -> Tensor:
    """The recurrence, token by token, for each head separately."""
    options = mamba.options
    inner, heads = options.expand * mamba.width, mamba.heads
    shared = options.groups * options.state_size
    z, x, B, C, dt = mamba.input(u)
    mixed = F.silu(convolved(torch.cat([x, B, C], -1), mamba.conv.taps) + mamba.conv.bias)
    x, B, C = mixed.split([inner, shared, shared], dim=-1)
    dt = F.softplus(dt + mamba.dt_bias)
    x = x.unflatten(-1, (heads, -1))
    B, C = (t.unflatten(-1, (options.groups, -1)) for t in (B, C))
    y = torch.zeros_like(x)
    for head in range(heads):
        group = head * options.groups // heads
        state = x.new_zeros(options.head_dim, options.state_size)
        for t in range(len(u)):
            decay = torch.exp(-dt[t, head] * mamba.A_log[head].exp())
            state = decay * state + dt[t, head] * torch.outer(x[t, head], B[t, group])
            y[t, head] = state @ C[t, group] + mamba.D[head] * x[t, head]
    gated = y.flatten(1) * F.silu(z)
    parts = gated.chunk(options.norm_groups or options.groups, dim=-1)
    normed = [p / (p.square().mean(-1, keepdim=True) + options.norm_eps).sqrt() for p in parts]
    out: Tensor = mamba.output(mamba.norm.weight * torch.cat(normed, -1))
    return out


@pytest.mark.parametrize(
    "options",
    [
        {"chunk": 8},
        {"chunk": 16, "groups": 2, "bias": True},
        {"chunk": 1, "groups": 4, "norm_groups": 1},
    ],
)
def test_is_its_definition(options: dict[str, Any]) -> None:
    is_its_definition(make("mamba2", state_size=3, head_dim=4, **options), definition)


def test_changes_are_seen() -> None:
    mamba = make("mamba2", state_size=3, head_dim=4, groups=2, chunk=8)

    def shift_the_filter(changed: Any) -> None:
        changed.conv.taps[:] = changed.conv.taps.roll(1, dims=1)

    def swap_the_gate(changed: Any) -> None:
        changed.input.weight[:32] = changed.input.weight[:32].roll(16, dims=0)

    def swap_groups(changed: Any) -> None:
        changed.input.weight[32:38] = changed.input.weight[32:38].roll(3, dims=0)

    for change in (shift_the_filter, swap_the_gate, swap_groups):
        is_seen(mamba, definition, change)
    documents_matter(mamba, definition)


def test_in_bf16() -> None:
    rounds_to(make("mamba2", state_size=3, head_dim=4, chunk=8), 0.03)
