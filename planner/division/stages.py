"""Plans of a division's stages: choices for their layers, and costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...trainer.layout.cuts import Cuts
from .choices import Relaxation
from .problem import FixedCosts, Problem, StagePlan, cost_stage

FAVOUR = 1e-7
"""Part of a second by which the first chunk's seconds weigh more or less. A stage's time is the sum
over its chunks, but other stages wait for the first one at the end of a step."""
LayerCounts = tuple[int, ...]
"""Number of layers by kind."""


class Stages:
    """Plans of a problem's stages, with a cache."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._prefix: list[list[int]] = problem.counts.tolist()
        self._relaxations: dict[tuple[tuple[float, ...], float], Relaxation] = {}
        self._plans: dict[tuple[int, bool, bool, tuple[LayerCounts, ...]], StagePlan] = {}

    def ends(self, stage: int) -> list[tuple[int, FixedCosts]]:
        """Return the fixed costs of a stage, with their micro-batches in flight."""
        problem = self.problem
        pairs = zip(problem.in_flight(stage), problem.stage_chunks(stage), strict=True)
        return [(n, end) for n, chunk in pairs for end in problem.end_costs(chunk)]

    def layer_budget(self, stage: int) -> float:
        """Return the bytes left for layers, modules and workspace."""
        fixed = sum(end.state + n * end.activations for n, end in self.ends(stage))
        return self.problem.stage_budget(stage) - fixed

    def relaxation(self, stage: int, in_flight: Sequence[float]) -> Relaxation:
        """Return the linear program of a stage; chunks have these micro-batches in flight."""
        min_workspace = max((end.workspace for _, end in self.ends(stage)), default=0.0)
        key = tuple(dict.fromkeys(in_flight)), min_workspace
        if key not in self._relaxations:
            kinds = range(len(self.problem.kinds))
            columns = [(kind, n) for n in key[0] for kind in kinds]
            self._relaxations[key] = Relaxation(self.problem, columns, min_workspace)
        return self._relaxations[key]

    def plans(self, cuts: Cuts, *, last: bool = False, exact: bool = True) -> tuple[StagePlan, ...]:
        """Return the plans of all stages; of equal times, the first chunk's passes are the fastest,
        or the `last` one's. Without `exact`, choices are those of linear programming in whole
        layers."""
        prefix = self._prefix
        counts = [
            tuple(after - before for before, after in zip(prefix[first], prefix[end], strict=True))
            for first, end in self.problem.ranges(cuts)
        ]
        plans = []
        for stage in range(self.problem.stages):
            key = stage, last, exact, tuple(counts[stage :: self.problem.stages])
            if key not in self._plans:
                self._plans[key] = self._plan_stage(stage, key[3], last, exact)
            plans.append(self._plans[key])
        return tuple(plans)

    def _plan_stage(
        self, stage: int, counts: Sequence[LayerCounts], last: bool, exact: bool
    ) -> StagePlan:
        """Choose for a stage's layers: `counts` by chunk and kind."""
        problem, in_flight = self.problem, self.problem.in_flight(stage)
        relaxation = self.relaxation(stage, in_flight)
        layers = dict.fromkeys(relaxation.columns, 0)
        for n, by_kind in zip(in_flight, counts, strict=True):
            for kind, count in enumerate(by_kind):
                layers[kind, n] += count
        called = {kind for by_kind in counts for kind, count in enumerate(by_kind) if count}
        budget = self.layer_budget(stage)
        budget -= sum(module.state for module in problem.called_modules(called))
        favour = -FAVOUR if last else FAVOUR
        weights = [1.0 + favour * (n == in_flight[0]) for _, n in relaxation.columns]
        numbers = relaxation.choose(np.array([*layers.values()]), budget, weights, exact=exact)
        unassigned = dict(zip(relaxation.columns, numbers, strict=True))
        split = [[(0,) * len(kind.choices) for kind in problem.kinds] for _ in counts]
        for chunk in [*range(problem.chunks)][:: -1 if last else 1]:
            for kind, count in enumerate(counts[chunk]):
                if count:
                    choices = unassigned[kind, in_flight[chunk]]
                    split[chunk][kind] = _take_fastest(problem, kind, choices, count)
        groups = [
            [
                (kind, choice, n)
                for kind, taken in enumerate(by_kind)
                for choice, n in zip(problem.kinds[kind].choices, taken, strict=True)
                if n
            ]
            for by_kind in split
        ]
        return replace(cost_stage(problem, stage, groups), counts=tuple(map(tuple, split)))


def _take_fastest(problem: Problem, kind: int, numbers: list[int], count: int) -> tuple[int, ...]:
    """Take `count` layers of a kind from `numbers` (layers by choice), fastest first."""
    choices, taken = problem.kinds[kind].choices, [0] * len(numbers)
    for choice in sorted(range(len(choices)), key=lambda number: choices[number].backward):
        taken[choice] = min(numbers[choice], count)
        numbers[choice] -= taken[choice]
        count -= taken[choice]
    return tuple(taken)
