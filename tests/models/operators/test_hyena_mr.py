from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.kernels.operator_checks import (
    convolved,
    documents_matter,
    featurized,
    for_channels,
    is_its_definition,
    is_seen,
    make,
    rounds_to,
)
from torch import Tensor

ENDS = {"weak": (1e-2, 1e2), "normal": (1e-1, 1e2), "strong": (1.0, 1e2)}


def definition(hyena: Any, u: Tensor) -> Tensor:
    """ĥ with its decay: the rates are a geometric series over groups."""
    options = hyena.options
    taps = hyena.taps.clone()
    if options.decay != "none":
        low, high = ENDS[options.decay]
        for group in range(options.groups):
            different = options.groups // options.decay_repeats
            rate = low * (high / low) ** (group % different / (different - 1))
            time = torch.arange(options.taps).double() / (options.filter_horizon - 1)
            taps[group] = taps[group] * torch.exp(-rate * time)
    q, w = featurized(hyena, u)
    y = convolved(w, for_channels(taps, hyena.width)) + hyena.skip * w
    out: Tensor = hyena.output(q * y)
    return out


@pytest.mark.parametrize("method", ["auto", "direct", "toeplitz", "fft"])
@pytest.mark.parametrize(
    "options",
    [
        {"taps": 5, "decay": "weak"},
        {"taps": 20, "decay": "normal"},
        {"taps": 40, "decay": "strong"},
        {"taps": 40, "decay": "none"},
        {"taps": 40, "decay": "strong", "decay_repeats": 2},
    ],
)
def test_every_form_is_its_definition(method: str, options: dict[str, Any]) -> None:
    hyena = make("hyena-mr", groups=4, filter_horizon=64, method=method, **options)
    is_its_definition(hyena, definition)


def test_changes_are_seen() -> None:
    hyena = make("hyena-mr", groups=4, taps=20, filter_horizon=64)

    def shift_the_filter(changed: Any) -> None:
        changed.taps[:] = changed.taps.roll(1, dims=1)

    def reverse_the_filter(changed: Any) -> None:
        changed.taps[:] = changed.taps.flip(1)

    def forget_the_decay(changed: Any) -> None:
        changed.options = dataclasses.replace(changed.options, decay="none")

    def take_the_horizon_for_the_length(changed: Any) -> None:
        changed.options = dataclasses.replace(changed.options, filter_horizon=37)

    def swap_the_gates(changed: Any) -> None:
        changed.qkv.weight[:16] = changed.qkv.weight[:16].roll(8, dims=0)

    def drop_the_skip(changed: Any) -> None:
        changed.skip.zero_()

    for change in (
        shift_the_filter,
        reverse_the_filter,
        forget_the_decay,
        take_the_horizon_for_the_length,
        swap_the_gates,
        drop_the_skip,
    ):
        is_seen(hyena, definition, change)
    documents_matter(hyena, definition)


@pytest.mark.parametrize("method", ["direct", "toeplitz", "fft"])
def test_in_bf16(method: str) -> None:
    rounds_to(make("hyena-mr", groups=4, taps=20, filter_horizon=64, method=method), 0.02)
