from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernels.operator_checks import (
    convolved,
    documents_matter,
    featurized,
    is_its_definition,
    is_seen,
)
from support.kernels.operator_checks import make as make_operator
from torch import Tensor


def make(**options: Any) -> Any:
    """Build the operator, its steps inside and outside of their bounds."""
    hyena = make_operator("hyena-li-factored", state_size=3, filter_horizon=20, **options)
    generator = torch.Generator().manual_seed(2)
    hyena.steps.data = 0.12 * torch.rand(hyena.steps.shape, generator=generator).double()
    return hyena


def definition(hyena: Any, u: Tensor) -> Tensor:
    """The filter tap by tap, with products written out."""
    taps = torch.zeros(hyena.width, len(u), dtype=u.dtype)
    for t in range(len(u)):
        time = t * 20 / 19
        for n in range(3):
            pole, residue = torch.ones(2, hyena.width, dtype=u.dtype).unbind()
            for factor in range(hyena.options.pole_factors):
                pole = pole * hyena.poles[:, n, factor]
            for factor in range(hyena.options.residue_factors):
                residue = residue * hyena.residues[:, n, factor]
            step = hyena.steps[:, n].clamp(0.001, 0.1)
            taps[:, t] = taps[:, t] + residue * torch.exp(-step * pole.exp() * time)
    q, w = featurized(hyena, u)
    out: Tensor = hyena.output(q * (convolved(w, taps) + hyena.skip * w))
    return out


@pytest.mark.parametrize(
    "options", [{"method": "fft"}, {"chunk": 8, "pole_factors": 1}, {"residue_factors": 5}]
)
def test_every_form_is_its_definition(options: dict[str, Any]) -> None:
    is_its_definition(make(**options), definition)


def test_changes_are_seen() -> None:
    hyena = make(chunk=8)

    def shorten_the_steps(changed: Any) -> None:
        changed.steps.mul_(0.5)

    def take_one_factor_of_a_residue(changed: Any) -> None:
        changed.residues[:, :, 1] = 1.0

    for change in (shorten_the_steps, take_one_factor_of_a_residue):
        is_seen(hyena, definition, change)
    documents_matter(hyena, definition)
