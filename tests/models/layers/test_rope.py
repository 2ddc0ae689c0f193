"""Properties of rotary positions; conversion/ compares the scalings with transformers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace.models.config.options.rope import Rope
from headrace.models.layers.rope import frequencies, rotate, rotation

CPU = torch.device("cpu")


def test_scores_depend_only_on_distance() -> None:
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=torch.float64)

    def score(at: int, key_position: int) -> float:
        turned = []
        for x, position in ((q, at), (k, key_position)):
            cos, sin = rotation(Rope(base=100.0), torch.tensor([[position]]), 16)
            turned.append(rotate(x, cos, sin))
        return float((turned[0] * turned[1]).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), rel=1e-4)
    assert score(7, 3) != pytest.approx(score(8, 3), rel=1e-2)


def test_position_interpolation_divides_positions() -> None:
    scaled = Rope(scaling="linear", factor=4.0)
    far, _ = rotation(scaled, torch.tensor([[8]]), 16)
    near, _ = rotation(Rope(), torch.tensor([[2]]), 16)
    assert torch.allclose(far, near)


def test_ntk_keeps_the_fastest_and_divides_the_slowest() -> None:
    plain, _ = frequencies(Rope(), 64, CPU)
    scaled, _ = frequencies(Rope(scaling="ntk", factor=8.0), 64, CPU)
    assert float(scaled[0]) == float(plain[0])
    assert float(scaled[-1]) == pytest.approx(float(plain[-1]) / 8, rel=1e-5)


def test_only_some_channels_turn() -> None:
    x = torch.randn(1, 1, 1, 16)
    cos, sin = rotation(Rope(channels=4), torch.tensor([[5]]), 4)
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    whole, _ = rotation(Rope(), torch.tensor([[5]]), 4)
    assert torch.equal(whole, cos)
    assert not torch.equal(turned[..., :4], x[..., :4])


def test_only_the_fastest_pairs_turn() -> None:
    """Frequencies are those of the whole head."""
    some, _ = frequencies(Rope(proportion=0.5), 16, CPU)
    whole, _ = frequencies(Rope(), 16, CPU)
    assert torch.equal(some[:4], whole[:4]) and not some[4:].any()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"proportion": 0.0}, "proportion must be above 0 and at most 1, not 0.0"),
        ({"truncate": False}, "belong to `scaling: yarn`"),
        ({"scaling": "yarn", "factor": 2.0, "attention_factor": 0.0}, "must be above 0, not 0.0"),
    ],
)
def test_contradictions_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rope(**values)
