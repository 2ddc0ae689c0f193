"""Initial values of the filters whose start an option takes from Savanna."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from headrace.console.config import build
from headrace.models.config.config import ModelConfig
from headrace.models.model.model import Model

WIDTH = 512


def starts(kind: str, **options: Any) -> dict[str, Tensor]:
    """Return the initial parameters of one operator of width 512."""
    data = {
        "vocab_size": 8,
        "width": WIDTH,
        "pattern": "[one]",
        "operators": {"one": {"kind": kind, **options}},
    }
    model = Model(build(ModelConfig, data, source="a test"))
    model.init_weights(0)
    prefix = "blocks.0.mixer.operator."
    return {n.removeprefix(prefix): p.detach() for n, p in model.named_parameters()}


def test_rates_as_a_product_start_at_p_and_gamma() -> None:
    result = starts("hyena-li", rates="product", gamma_min=0.002, gamma_max=0.3)
    p, gamma = result["rates"]
    assert (p == -1).all()
    assert 0.002 <= gamma.exp().min() < 0.004 and 0.29 < gamma.exp().max() <= 0.3001
    assert abs(float(gamma.exp().mean()) - 0.151) < 0.005
    alone = starts("hyena-li", gamma_min=0.002, gamma_max=0.3)["rates"]
    assert abs(float(alone.exp().mean()) - 0.151 / math.e) < 0.002
    assert float(starts("hyena-li")["rates"].exp().max()) < 0.1 / math.e + 1e-6


def test_s4d_starts_as_s4d_lin() -> None:
    result = starts("hyena-li-s4d", state_size=8)
    assert torch.allclose(result["rates"].exp(), torch.tensor(0.5))
    assert torch.allclose(result["angles"], math.pi * torch.arange(8.0).expand(WIDTH, 8))
    assert (result["inputs"] == 1).all() and not result["inputs_i"].any()
    steps = result["steps"].exp()
    assert steps.min() >= 0.001 and steps.max() <= 0.1
    assert abs(float(result["steps"].mean()) - math.log(0.01)) < 0.15  # uniform in the logarithm
    power = result["residues"].square() + result["residues_i"].square()
    assert abs(float(power.mean()) - 1) < 0.05


def test_factored_poles_are_equal_in_all_channels() -> None:
    result = starts("hyena-li-factored", state_size=16, residue_factors=4)
    assert (result["poles"] == result["poles"][:1]).all() and result["poles"].std() > 0.5
    assert abs(float(result["residues"].std()) - 0.25) < 0.01
    assert result["steps"].min() >= 0.001 and result["steps"].max() <= 0.1


def test_the_last_layer_of_a_free_form_filter_starts_smaller() -> None:
    """Xavier's standard deviation at width 512 is 0.062; the default's 0.144."""
    result = starts("hyena-li-freeform", last_start="xavier", frequency=14, learned_decay=True)
    assert abs(float(result["last.weight"].std()) - math.sqrt(2 / (16 + WIDTH))) < 0.002
    assert abs(float(starts("hyena-li-freeform")["last.weight"].std()) - 0.144) < 0.003
    assert (result["frequency"] == 14).all()
    ends = [math.log(0.01) / 1.2, math.log(0.01) / 0.3]
    assert torch.allclose(result["decay"], torch.linspace(*ends, WIDTH))


def test_slow_heads_start_with_the_filters_of_their_number() -> None:
    """The last layer's outputs, the decays and the skips are as many as the heads."""
    result = starts(
        "hyena-li-freeform", groups=32, slow_heads=True, last_start="xavier", learned_decay=True
    )
    assert abs(float(result["last.weight"].std()) - math.sqrt(2 / (16 + 32))) < 0.02
    ends = [math.log(0.01) / 1.2, math.log(0.01) / 0.3]
    assert torch.allclose(result["decay"], torch.linspace(*ends, 32))
    assert result["skip"].shape == (32,) and 0.45 < result["skip"].abs().max() <= 3**-0.5
    modal = starts("hyena-li", groups=32, slow_heads=True, rates="product")
    assert modal["rates"].shape == (2, 32, 16) and (modal["rates"][0] == -1).all()


def test_the_taps_of_a_short_mlp_start_by_the_featurizers_length() -> None:
    """Savanna draws every short filter from U(±1/√short_conv_L)."""
    result = starts("hyena-mlp", hidden=WIDTH, groups=WIDTH, taps=7, featurizer=3)
    for name in ("taps", "featurizer.taps"):
        assert 0.55 < result[name].abs().max() <= 3**-0.5
    plain = starts("hyena-mlp", hidden=WIDTH, groups=WIDTH, taps=7)
    assert plain["taps"].abs().max() <= 7**-0.5
