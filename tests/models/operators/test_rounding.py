"""Rounding of a scan's rates to bf16: docs/trainer.md gives these bounds."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from headrace.models.config.config import load_model_config
from headrace.models.model.model import Model

PACE = {
    "A_log": (torch.exp, 0.008),
    "dt_bias": (F.softplus, 0.016),
    "rates": (torch.exp, 0.016),
}


@pytest.mark.parametrize("name", ["tiny-mamba", "tiny-hybrid"])
def test_rounding_errors_of_rates_are_as_documented(name: str) -> None:
    model = Model(load_model_config(name))
    model.init_weights(1)
    worst = dict.fromkeys(PACE, 0.0)
    for path, parameter in model.named_parameters():
        leaf = path.rpartition(".")[2]
        if leaf in PACE:
            pace = PACE[leaf][0]
            exact, rounded = (pace(p.double()) for p in (parameter.data, parameter.data.bfloat16()))
            worst[leaf] = max(worst[leaf], float(((rounded - exact) / exact).abs().max()))
    assert any(worst.values()), "bf16 rounds some of them"
    for leaf, error in worst.items():
        assert error <= PACE[leaf][1], (leaf, error)
