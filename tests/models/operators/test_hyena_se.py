from __future__ import annotations

from typing import Any

import pytest
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


def definition(hyena: Any, u: Tensor) -> Tensor:
    q, w = featurized(hyena, u)
    y: Tensor = hyena.output(q * convolved(w, for_channels(hyena.taps, hyena.width)))
    return y


def partly_gated(hyena: Any, u: Tensor) -> Tensor:
    """The same, without the gates that the options leave out."""
    z = convolved(u @ hyena.qkv.weight.T, hyena.featurizer.taps)
    q, k, v = z.split(hyena.width, dim=-1)
    taps = for_channels(hyena.taps, hyena.width)
    y = convolved(k * v if hyena.options.pregate else v, taps)
    out: Tensor = hyena.output(q * y if hyena.options.postgate else y)
    return out


@pytest.mark.parametrize(("pregate", "postgate"), [(False, True), (True, False), (False, False)])
def test_gates_can_be_left_out(pregate: bool, postgate: bool) -> None:
    hyena = make("hyena-se", groups=4, pregate=pregate, postgate=postgate)
    is_its_definition(hyena, partly_gated)
    is_seen(make("hyena-se", groups=4), lambda _, u: partly_gated(hyena, u), lambda _: None)


@pytest.mark.parametrize("taps", [1, 7, 16])
def test_is_its_definition(taps: int) -> None:
    is_its_definition(make("hyena-se", groups=4, taps=taps), definition)


def test_changes_are_seen() -> None:
    hyena = make("hyena-se", groups=4)

    def shift_the_filter(changed: Any) -> None:
        changed.taps[:] = changed.taps.roll(1, dims=1)

    def shift_the_featurizer(changed: Any) -> None:
        changed.featurizer.taps[:] = changed.featurizer.taps.roll(1, dims=1)

    def swap_the_gates(changed: Any) -> None:
        changed.qkv.weight[:16] = changed.qkv.weight[:16].roll(8, dims=0)

    def swap_groups(changed: Any) -> None:
        changed.taps[:] = changed.taps.flip(0)

    for change in (shift_the_filter, shift_the_featurizer, swap_the_gates, swap_groups):
        is_seen(hyena, definition, change)
    documents_matter(hyena, definition)


def test_in_bf16() -> None:
    rounds_to(make("hyena-se", groups=4), 0.02)
