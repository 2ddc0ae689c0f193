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
    rank, size = options.rank(mamba.width), options.state_size
    x, z = (u @ mamba.input.weight.T).chunk(2, dim=-1)
    x = F.silu(convolved(x, mamba.conv.taps) + mamba.conv.bias)
    outputs = []
    for head, part in enumerate(x.chunk(options.heads, dim=-1)):
        A = -torch.exp(mamba.A_log[head])
        state = torch.zeros_like(A)
        ys = []
        for x_t in part:
            delta, B, C = (mamba.select[head] @ x_t).split([rank, size, size])
            dt = F.softplus(mamba.dt[head] @ delta + mamba.dt_bias[head])[:, None]
            state = torch.exp(dt * A) * state + dt * x_t[:, None] * B
            ys.append(state @ C + mamba.D[head] * x_t)
        outputs.append(torch.stack(ys))
    y = torch.cat(outputs, dim=-1) * F.silu(z)
    return y @ mamba.output.weight.T


@pytest.mark.parametrize(
    "options",
    [{"chunk": 8}, {"chunk": 16, "heads": 2, "dt_rank": 3}, {"chunk": 1, "expand": 1, "conv": 2}],
)
def test_is_its_definition(options: dict[str, Any]) -> None:
    is_its_definition(make("mamba1", state_size=3, **options), definition)


def test_changes_are_seen() -> None:
    mamba = make("mamba1", state_size=3, heads=2, chunk=8)

    def shift_the_filter(changed: Any) -> None:
        changed.conv.taps[:] = changed.conv.taps.roll(1, dims=1)

    def swap_the_gate(changed: Any) -> None:
        changed.input.weight[:] = changed.input.weight.roll(16, dims=0)

    def swap_heads(changed: Any) -> None:
        changed.A_log[:] = changed.A_log.flip(0)

    for change in (shift_the_filter, swap_the_gate, swap_heads):
        is_seen(mamba, definition, change)
    documents_matter(mamba, definition)


def test_in_bf16() -> None:
    rounds_to(make("mamba1", state_size=3, chunk=8), 0.03)
