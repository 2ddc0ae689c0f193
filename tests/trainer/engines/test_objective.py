from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from headrace.console.config import build
from headrace.models.config.config import ModelConfig
from headrace.models.model.model import Model
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


def test_the_z_loss_changes_neither_the_losses_of_rows_nor_the_objective() -> None:
    """The objective is Σ w·(ℓ + z·log²Z), to the bit; evaluation has no z-loss."""
    data = {
        "vocab_size": 11,
        "width": 8,
        "pattern": "mlp",
        "operators": {"mlp": {"kind": "glu", "hidden": 8}},
    }
    model = Model(build(ModelConfig, data, source="a test"))
    model.init_weights(1)
    tokens, targets = torch.randint(0, 11, (2, 3, 12))
    weights = torch.rand(3, 12)
    weights[1, 4:] = 0
    batch = tokens, targets, weights, None
    plain, objective = Objective(model), Objective(model, z_loss=0.1)
    sums, again = objective(*batch), objective(*batch)
    assert torch.equal(sums.rows, plain(*batch).rows) and torch.equal(sums.total, again.total)
    wide = model.logits(model.hidden(tokens)[0]).detach()
    squares = 0.1 * torch.logsumexp(wide, -1).square()
    losses = cross_entropy(wide.transpose(1, 2), targets, reduction="none")
    token_losses = torch.where(weights != 0, losses + squares, 0) * weights
    assert torch.equal(sums.total.detach(), torch.stack([row.sum() for row in token_losses]).sum())
    penalty = float(objective.take_penalty(tokens.device))
    assert penalty == pytest.approx(2 * float((squares * weights).sum()))
    assert float(objective.take_penalty(tokens.device)) == 0, "it was taken"
    held_out = objective.eval()(*batch)
    assert torch.equal(held_out.total, held_out.rows.sum())
    assert float(objective.take_penalty(tokens.device)) == 0
