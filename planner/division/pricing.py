"""Price a division with a choice for every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...trainer.layout.cuts import Cuts
from .problem import Choice, FixedCosts, Problem, StagePlan, price


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
    stages = []
    for stage in range(problem.stages):
        chunks, in_flight = problem.stage_chunks(stage), problem.in_flight(stage)
        chunk_layers = [range(*ranges[chunk]) for chunk in chunks]
        chunk_ends = [list(problem.end_costs(chunk)) for chunk in chunks]
        chunk_kinds = [
            [problem.kinds[problem.layers[layer]] for layer in layers] for layers in chunk_layers
        ]
        chunk_costs: list[list[Choice | FixedCosts]] = [
            [*(choices[layer] for layer in layers), *ends]
            for layers, ends in zip(chunk_layers, chunk_ends, strict=True)
        ]
        stage_kinds = [kind for kinds in chunk_kinds for kind in kinds]
        stage_costs = [cost for costs in chunk_costs for cost in costs]
        called_modules = {kind.module for kind in stage_kinds if kind.module is not None}
        modules = [problem.modules[number] for number in called_modules]
        state = sum(cost.state for cost in stage_costs) + sum(m.state for m in modules)
        activations = sum(
            n * cost.activations
            for n, costs in zip(in_flight, chunk_costs, strict=True)
            for cost in costs
        )
        stages.append(
            StagePlan(
                forward=tuple(
                    sum(kind.forward for kind in kinds) + sum(end.forward for end in ends)
                    for kinds, ends in zip(chunk_kinds, chunk_ends, strict=True)
                ),
                backward=tuple(sum(cost.backward for cost in costs) for costs in chunk_costs),
                update=sum(kind.update for kind in stage_kinds)
                + sum(end.update for ends in chunk_ends for end in ends)
                + sum(module.update for module in modules),
                memory=state + activations + max(cost.workspace for cost in stage_costs),
                counts=(),
            )
        )
    return PricedDivision(price(problem, stages), cuts, tuple(choices), tuple(stages))
