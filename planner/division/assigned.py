"""Divisions with a given choice for each layer, priced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...trainer.layout.cuts import Cuts
from .problem import Choice, Fixed, Problem, StagePlan, price


@dataclass(frozen=True)
class Assigned:
    """A division with a choice for each layer, priced."""

    price: float
    cuts: Cuts
    choices: tuple[Choice, ...]
    """Choice of each layer."""
    stages: tuple[StagePlan, ...]


def assigned(problem: Problem, cuts: Cuts, choices: Sequence[Choice]) -> Assigned:
    """Price a division with given choices."""
    ranges = problem.ranges(cuts)
    stages = []
    for stage in range(problem.stages):
        own, alive = problem.own(stage), problem.alive(stage)
        layers = [range(*ranges[chunk]) for chunk in own]
        fixed = [list(problem.fixed(chunk)) for chunk in own]
        sorts = [[problem.sorts[problem.layers[layer]] for layer in each] for each in layers]
        parts: list[list[Choice | Fixed]] = [
            [*(choices[layer] for layer in each), *ends]
            for each, ends in zip(layers, fixed, strict=True)
        ]
        called = {sort.module for each in sorts for sort in each if sort.module is not None}
        modules = [problem.modules[number] for number in called]
        held = sum(part.held for each in parts for part in each) + sum(m.held for m in modules)
        kept = sum(n * part.kept for n, each in zip(alive, parts, strict=True) for part in each)
        stages.append(
            StagePlan(
                forward=tuple(
                    sum(sort.forward for sort in each) + sum(end.forward for end in ends)
                    for each, ends in zip(sorts, fixed, strict=True)
                ),
                backward=tuple(sum(part.backward for part in each) for each in parts),
                update=sum(sort.update for each in sorts for sort in each)
                + sum(end.update for ends in fixed for end in ends)
                + sum(module.update for module in modules),
                memory=held + kept + max(part.work for each in parts for part in each),
                counts=(),
            )
        )
    return Assigned(price(problem, stages), cuts, tuple(choices), tuple(stages))
