"""Divisions with a given choice for each layer, priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...trainer.layout.cuts import Cuts
from .problem import Choice, FixedCosts, Problem, StagePlan, price


@dataclass(frozen=True)
class PricedDivision:
    """A division with a choice for each layer, priced."""

    price: float
    cuts: Cuts
    choices: tuple[Choice, ...]
    """Choice of each layer."""
    stages: tuple[StagePlan, ...]


def price_division(problem: Problem, cuts: Cuts, choices: Sequence[Choice]) -> PricedDivision:
    """Price a division with given choices."""
    ranges = problem.ranges(cuts)
    stages = []
    for stage in range(problem.stages):
        chunks, alive = problem.stage_chunks(stage), problem.alive(stage)
        layers = [range(*ranges[chunk]) for chunk in chunks]
        ends = [list(problem.end_costs(chunk)) for chunk in chunks]
        kinds = [[problem.kinds[problem.layers[layer]] for layer in each] for each in layers]
        parts: list[list[Choice | FixedCosts]] = [
            [*(choices[layer] for layer in each), *ends]
            for each, ends in zip(layers, ends, strict=True)
        ]
        called_modules = {kind.module for each in kinds for kind in each if kind.module is not None}
        modules = [problem.modules[number] for number in called_modules]
        state = sum(part.state for each in parts for part in each) + sum(m.state for m in modules)
        activations = sum(
            n * part.activations for n, each in zip(alive, parts, strict=True) for part in each
        )
        stages.append(
            StagePlan(
                forward=tuple(
                    sum(kind.forward for kind in each) + sum(end.forward for end in ends)
                    for each, ends in zip(kinds, ends, strict=True)
                ),
                backward=tuple(sum(part.backward for part in each) for each in parts),
                update=sum(kind.update for each in kinds for kind in each)
                + sum(end.update for ends in ends for end in ends)
                + sum(module.update for module in modules),
                memory=state + activations + max(part.workspace for each in parts for part in each),
                counts=(),
            )
        )
    return PricedDivision(price(problem, stages), cuts, tuple(choices), tuple(stages))
