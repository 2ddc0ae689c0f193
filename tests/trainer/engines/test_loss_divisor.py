"""Savanna's two weighted losses, in every layout: one divisor for the global batch."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import get_args

import pytest
import torch
from support.configs import CONFIGS
from support.ranks.fixtures import AGREEING
from support.ranks.ranks import Ranks
from torch.nn import functional as F

from headrace.models.config.config import load_model_config
from headrace.models.config.options.names import Divisor
from headrace.models.model.loss import LossParts
from headrace.models.model.model import Model, initial_weights
from headrace.trainer.engines.objective import Objective, divisor_terms

LAYOUTS = {"dp2": (1, 1), "tp2": (2, 1), "cp2": (1, 2)}


@pytest.fixture(scope="module")
def agreeing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("agreeing_here", AGREEING)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def savanna(
    losses: torch.Tensor, mask: torch.Tensor, lower: torch.Tensor, divisor: Divisor
) -> torch.Tensor:
    """Its `reweighted_cross_entropy` with lowercase_weight 0.1, from the mask of the targets that
    count (control tags do not) and the mask of lower-case ones."""
    weights = torch.zeros_like(mask)
    weights[mask.bool() & ~lower] = 1.0
    weights[mask.bool() & lower] = 0.1
    if divisor == "weights":  # to_upper: normalized_weighted
        weights = mask.sum() * weights / weights.sum()
    losses = losses * (weights * mask)
    return torch.sum(losses * mask) / mask.sum()


def expected(agreeing: ModuleType, divisor: Divisor, z_loss: float = 0.0) -> list[float]:
    """Return the loss, the gradient norm and the z-loss of the whole step in one forward pass."""
    model = Model(load_model_config(agreeing.TINY))
    with torch.no_grad():
        for name, tensor in initial_weights(model.config, 3).items():
            model.get_parameter(name).copy_(tensor)
    (batch,) = next(
        iter(
            agreeing.SyntheticLoader(agreeing.GENOME, rank=0, world=1, micro_batch=4, start_step=0)
        )
    )
    kind = batch.targets % 3
    logits = model(batch.tokens)
    losses = F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none")
    loss = savanna(losses, (kind != 2).float(), kind == 1, divisor)
    squares = logits.exp().sum(-1).log().square()
    penalty = z_loss * savanna(squares, (kind != 2).float(), kind == 1, divisor)
    (loss + penalty).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return [float(loss.detach()), float(norm), float(penalty.detach())]


@pytest.mark.parametrize("divisor", ["weights", "targets"])
def test_the_loss_is_savannas_in_every_layout(
    two_ranks: Ranks, agreeing: ModuleType, divisor: Divisor
) -> None:
    expected_loss = expected(agreeing, divisor)
    for name, (tp, cp) in LAYOUTS.items():
        for loss in two_ranks.run("divided_loss", tp=tp, cp=cp, divisor=divisor, z_loss=0.0):
            assert loss == pytest.approx(expected_loss, rel=2e-5), name
    other_divisor_loss = expected(agreeing, "targets" if divisor == "weights" else "weights")
    assert expected_loss != pytest.approx(other_divisor_loss, rel=0.05), "the two losses differ"


@pytest.mark.parametrize("divisor", ["weights", "targets"])
def test_the_z_loss_is_apart_from_the_loss_in_every_layout(
    two_ranks: Ranks, agreeing: ModuleType, divisor: Divisor
) -> None:
    """The gradient is that of both."""
    alone, both = (expected(agreeing, divisor, z_loss) for z_loss in (0.0, 0.1))
    assert alone[0] == both[0] and alone[1] != pytest.approx(both[1], rel=1e-3)
    assert both[2] > 0.05 * both[0], "the loss would be another with it"
    for name, (tp, cp) in LAYOUTS.items():
        for step in two_ranks.run("divided_loss", tp=tp, cp=cp, divisor=divisor, z_loss=0.1):
            assert step == pytest.approx(both, rel=2e-5), name


def test_router_losses_keep_their_size() -> None:
    """They are divided by the divisor too, so they are multiplied by it first."""
    weights = torch.tensor([[1.0, 0.1, 0.0, 0.1]])
    assert divisor_terms(weights, "targets").tolist() == [[1, 1, 0, 1]]
    assert divisor_terms(weights, "weights") is weights

    class Routed(torch.nn.Module):
        axes = Model(load_model_config(CONFIGS / "tiny.yaml")).axes
        chunks = (range(1),)
        received: tuple[int, ...] = ()

        def run_chunk(self, *_: object, **__: object) -> tuple[list[torch.Tensor], torch.Tensor]:
            return [torch.zeros(1)], torch.full((1,), 7.0)

        def loss(self, *_: object) -> tuple[torch.Tensor, LossParts]:
            return torch.zeros(()), LossParts(*torch.zeros(3, 1))

    for divisor in get_args(Divisor):
        objective = Objective(Routed(), divisor=divisor)  # type: ignore[arg-type]
        total = objective(weights, weights, weights, None).total
        assert float(total / divisor_terms(weights, divisor).sum()) == pytest.approx(7.0)
