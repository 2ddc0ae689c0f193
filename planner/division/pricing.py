"""Price a division with a choice for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...trainer.layout.cuts import Cuts
from .problem import Choice, Problem, StagePlan, cost_stage, price


@dataclass(frozen=True)
class PricedDivision:
    """A division with a choice for every layer, and its price."""

    price: float
    cuts: Cuts
    choices: tuple[Choice, ...]
    """By layer."""
    stages: tuple[StagePlan, ...]


def price_division(problem: Problem, cuts: Cuts, choices: Sequence[Choice]) -> PricedDivision:
    """Price a division; `choices` has one for every layer."""
    ranges = problem.ranges(cuts)
    layers = [(kind, choice, 1) for kind, choice in zip(problem.layers, choices, strict=True)]
    stages = tuple(
        cost_stage(problem, stage, [layers[slice(*ranges[n])] for n in problem.stage_chunks(stage)])
        for stage in range(problem.stages)
    )
    return PricedDivision(price(problem, stages), cuts, tuple(choices), stages)
