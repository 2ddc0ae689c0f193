from __future__ import annotations

import pytest
import torch

from headrace.console.config import build
from headrace.models.config import ModelConfig
from headrace.models.model import Model
from headrace.trainer.engines.objective import Objective


@torch.no_grad()
def test_padding_rows_change_neither_the_loss_nor_router_losses() -> None:
    moe = {"kind": "moe", "experts": 4, "hidden": 8, "balance_loss": 1.0, "z_loss": 0.1}
    operators = {"mixer": {"kind": "attention", "heads": 2}, "moe": moe}
    data = {"vocab_size": 11, "width": 8, "pattern": "[mixer/moe] * 2", "operators": operators}
    model = Model(build(ModelConfig, data, source="a test"))
    model.init_weights(1)
    objective = Objective(model)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 11, (1, 13), generator=generator)
    weights = torch.ones(1, 12)
    row = (tokens[:, :-1], tokens[:, 1:], weights)
    alone = objective(*row, None)
    padded = objective(*(torch.cat([part, part.new_zeros(3, 12)]) for part in row), None)
    assert float(padded.total) == pytest.approx(float(alone.total), rel=1e-5)
    assert float(alone.total - alone.rows.sum()) > 12, "router losses are part of the total"
    nothing = objective(*(torch.zeros_like(part) for part in row), None)
    assert float(nothing.total) == 0
