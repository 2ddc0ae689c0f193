from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.kernels.operator_checks import (
    convolved,
    documents_matter,
    featurized,
    is_its_definition,
    is_seen,
    make,
    rounds_to,
)
from torch import Tensor


def definition(hyena: Any, u: Tensor) -> Tensor:
    """The filter tap by tap: features of time, a sine network, a decay for each channel."""
    options = hyena.options
    number = (options.features - 1) // 2
    horizon, width = hyena.options.filter_horizon, hyena.width
    taps = []
    for t in range(min(len(u), horizon)):
        step = (number - 1 - 1e-4) / max(number - 1, 1)
        bands = [1e-4 + band * step for band in range(number)]
        angles = torch.tensor([2 * math.pi * t / horizon * band for band in bands])
        time = t / (horizon - 1)
        hidden = torch.cat([torch.tensor([time]), angles.cos(), -angles.sin()]).double()
        for layer in hyena.layers:
            hidden = torch.sin(hyena.frequency * (layer.weight @ hidden + layer.bias))
        low, high = math.log(0.01) / options.slow_decay, math.log(0.01) / options.fast_decay
        fixed = [low + channel * (high - low) / (width - 1) for channel in range(width)]
        decay = torch.tensor(fixed).double() if hyena.decay is None else hyena.decay
        taps.append((hyena.last.weight @ hidden) * torch.exp(-time * decay.abs()))
    q, w = featurized(hyena, u)
    out: Tensor = hyena.output(q * (convolved(w, torch.stack(taps, 1)) + hyena.skip * w))
    return out


@pytest.fixture(autouse=True)
def exactly() -> Any:
    """Python's numbers become tensors of fp64."""
    standard = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(standard)


@pytest.mark.parametrize("horizon", [2, 20, 64])
def test_is_its_definition(horizon: int) -> None:
    """Filters shorter and longer than the row."""
    is_its_definition(make("hyena-li-freeform", filter_horizon=horizon), definition)


@pytest.mark.parametrize(
    "options",
    [
        {"features": 3, "inner_layers": 0, "learned_decay": True},
        {"features": 9, "inner_layers": 3, "slow_decay": 0.9, "fast_decay": 0.2},
    ],
)
def test_options_of_the_filter_are_their_definition(options: dict[str, Any]) -> None:
    is_its_definition(make("hyena-li-freeform", filter_horizon=20, **options), definition)


def test_changes_are_seen() -> None:
    hyena = make("hyena-li-freeform", filter_horizon=64)

    def take_the_horizon_for_the_length(changed: Any) -> None:
        changed.options = make("hyena-li-freeform", filter_horizon=37).options

    def swap_the_gates(changed: Any) -> None:
        changed.qkv.weight[:16] = changed.qkv.weight[:16].roll(8, dims=0)

    for change in (take_the_horizon_for_the_length, swap_the_gates):
        is_seen(hyena, definition, change)
    documents_matter(hyena, definition)


def test_in_bf16() -> None:
    rounds_to(make("hyena-li-freeform", filter_horizon=64), 0.05)
