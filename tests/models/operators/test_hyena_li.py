from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels.operator_checks import (
    documents_matter,
    featurized,
    is_its_definition,
    is_seen,
    make,
    rounds_to,
)
from torch import Tensor


def definition(hyena: Any, u: Tensor) -> Tensor:
    """A recurrence with N state elements for each channel."""
    q, w = featurized(hyena, u)
    rates = hyena.rates
    if hyena.options.rates == "product":
        rates = rates[0].exp() * rates[1].exp()
    elif hyena.options.rates == "log":
        rates = rates.exp()
    poles, residues = torch.exp(-rates).to(torch.complex128), hyena.residues.to(torch.complex128)
    if hyena.angles is not None:
        poles = poles * torch.exp(1j * hyena.angles)
        residues = residues + 1j * hyena.residues_i
    state = torch.zeros_like(poles)
    ys = []
    for w_t in w:
        state = poles * state + w_t[:, None]
        ys.append((residues * state).sum(-1).real)
    out: Tensor = hyena.output(q * (torch.stack(ys) + hyena.skip * w))
    return out


@pytest.mark.parametrize("poles", ["real", "complex"])
@pytest.mark.parametrize(
    "options",
    [
        {"method": "fft"},
        {"chunk": 1},
        {"chunk": 8},
        {"chunk": 16, "rates": "plain"},
        {"chunk": 64},
        {"rates": "product"},
    ],
)
def test_every_form_is_its_definition(poles: str, options: dict[str, Any]) -> None:
    hyena = make("hyena-li", state_size=3, poles=poles, **options)
    if options.get("rates") == "plain":
        hyena.rates.data = hyena.rates.data.abs()
    is_its_definition(hyena, definition)


def test_changes_are_seen() -> None:
    hyena = make("hyena-li", state_size=3, poles="complex", chunk=8)

    def swap_poles(changed: Any) -> None:
        changed.rates[:] = changed.rates.flip(0)

    def turn_the_other_way(changed: Any) -> None:
        changed.angles.neg_()

    def swap_the_gates(changed: Any) -> None:
        changed.qkv.weight[:16] = changed.qkv.weight[:16].roll(8, dims=0)

    def drop_the_skip(changed: Any) -> None:
        changed.skip.zero_()

    for change in (swap_poles, turn_the_other_way, swap_the_gates, drop_the_skip):
        is_seen(hyena, definition, change)
    documents_matter(hyena, definition)


@pytest.mark.parametrize("method", ["scan", "fft"])
def test_in_bf16(method: str) -> None:
    rounds_to(make("hyena-li", state_size=3, method=method, chunk=8), 0.02)
