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
)
from torch import Tensor


def definition(hyena: Any, u: Tensor) -> Tensor:
    """The discretised state space, mode by mode, as a recurrence."""
    q, w = featurized(hyena, u)
    total = hyena.skip * w
    for n in range(hyena.options.state_size):
        step = hyena.steps.exp()
        pole = -hyena.rates[:, n].exp() + 1j * hyena.angles[:, n]
        inputs = hyena.inputs[:, n] + 1j * hyena.inputs_i[:, n]
        outputs = hyena.residues[:, n] + 1j * hyena.residues_i[:, n]
        factor = outputs * inputs * step / (1 - step * pole / 2)
        state = torch.zeros_like(pole)
        ys = []
        for w_t in w:
            state = torch.exp(step * pole) * state + w_t
            ys.append(2 * (factor * state).real)
        total = total + torch.stack(ys)
    out: Tensor = hyena.output(q * total)
    return out


@pytest.mark.parametrize("options", [{"method": "fft"}, {"chunk": 1}, {"chunk": 8}])
def test_every_form_is_its_definition(options: dict[str, Any]) -> None:
    is_its_definition(make("hyena-li-s4d", state_size=2, **options), definition)


def test_changes_are_seen() -> None:
    hyena = make("hyena-li-s4d", state_size=2, chunk=8)

    def shorten_the_step(changed: Any) -> None:
        changed.steps -= 0.1

    def turn_the_other_way(changed: Any) -> None:
        changed.inputs_i.neg_()

    for change in (shorten_the_step, turn_the_other_way):
        is_seen(hyena, definition, change)
    documents_matter(hyena, definition)
