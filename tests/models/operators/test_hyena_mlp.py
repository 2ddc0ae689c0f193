from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels.operator_checks import (
    convolved,
    documents_matter,
    for_channels,
    is_its_definition,
    is_seen,
    make,
    rounds_to,
)
from torch import Tensor


def definition(mlp: Any, u: Tensor) -> Tensor:
    q, k, v = mlp.qkv(u)
    if mlp.featurizer is not None:
        z = convolved(torch.cat([q, k, v], dim=-1), mlp.featurizer.taps)
        q, k, v = z.split(mlp.options.hidden, dim=-1)
    y = convolved(k * v if mlp.options.pregate else v, for_channels(mlp.taps, mlp.options.hidden))
    out: Tensor = mlp.down(q * y if mlp.options.postgate else y)
    return out


@pytest.mark.parametrize(
    "options",
    [
        {"taps": 1},
        {"taps": 7},
        {"taps": 16, "bias": True},
        {"featurizer": 3, "output_bias": True},
        {"featurizer": 4, "pregate": False},
        {"postgate": False},
    ],
)
def test_is_its_definition(options: dict[str, Any]) -> None:
    is_its_definition(make("hyena-mlp", hidden=12, groups=3, **options), definition)


def test_changes_are_seen() -> None:
    mlp = make("hyena-mlp", hidden=12, groups=3)

    def shift_the_filter(changed: Any) -> None:
        changed.taps[:] = changed.taps.roll(1, dims=1)

    def swap_the_gates(changed: Any) -> None:
        changed.qkv.weight[:24] = changed.qkv.weight[:24].roll(12, dims=0)

    for change in (shift_the_filter, swap_the_gates):
        is_seen(mlp, definition, change)
    documents_matter(mlp, definition)


def test_in_bf16() -> None:
    rounds_to(make("hyena-mlp", hidden=12, groups=3), 0.02)
