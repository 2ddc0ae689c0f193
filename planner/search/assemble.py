"""From a solution to a plan's file: choices of each layer, time and memory by part."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from ...models.accounting.step import Timeline
from ...trainer.run.layout_plan import (
    LayerSpan,
    LayoutPlan,
    Planned,
    PlannedPhase,
    Predicted,
    model_hash,
)
from ..division.assigned import Assigned, assigned
from ..division.problem import Choice, Problem
from ..grid.grid import Grid
from ..prices.forms import Way
from ..prices.layers import Costs
from .outcome import Candidate

PARTS = {
    "compute": "forward and backward passes",
    "recompute": "passes that the backward pass repeats",
    "tensor": "messages of tensor parallelism",
    "context": "messages of context parallelism",
    "experts": "messages of expert parallelism",
    "data": "gathered weights and reduced gradients that no computation hides",
    "ends": "embedding, head and loss",
    "update": "gradients and weights once for a step, and the optimizer",
    "bubble": "waiting for other stages",
}
"""Parts of a step, and their meaning."""

ROUNDING = 1e-9
"""Part of a step below which a part of it is a rounding error."""


class InPhase(NamedTuple):
    """A plan in a phase."""

    grid: Grid
    problem: Problem
    plan: Assigned
    timelines: Sequence[Timeline]
    """Memory over a step of a rank of each stage."""

    @property
    def runs_as(self) -> tuple[Any, ...]:
        """All choices, without their costs."""
        return self.grid, self.plan.cuts, tuple(choice.name.key for choice in self.plan.choices)


def in_phase(candidate: Candidate) -> InPhase:
    """Return a candidate in the phase that it was found for."""
    grid, problem = candidate.grid, candidate.problem
    made = assigned(problem, candidate.solution.cuts, candidate.choices)
    return InPhase(grid, problem, made, candidate.timelines)


def same_choices(problem: Problem, ways: Sequence[Choice]) -> list[Choice]:
    """Return the choices of another phase's problem with the same rules."""
    found = []
    for sort, way in zip(problem.layers, ways, strict=True):
        alike = {choice.name.key: choice for choice in problem.sorts[sort].choices}
        found.append(alike[way.name.key])
    return found


def time_by_part(problem: Problem, plan: Assigned) -> dict[str, float]:
    """Return the seconds of the busiest stage by part; they add up to the price."""
    m, ranges = problem.micro_batches, problem.ranges(plan.cuts)
    busy = [sum(stage.forward) + sum(stage.backward) for stage in plan.stages]
    stage = max(range(problem.stages), key=lambda number: busy[number])
    found: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for chunk in problem.own(stage):
        for layer in range(*ranges[chunk]):
            way: Way = plan.choices[layer].name
            for parts in (way.forward, way.backward):
                for name, seconds in parts.items():
                    found[name] += m * seconds
        for end in problem.fixed(chunk):
            found["ends"] += m * (end.forward + end.backward)
    found["update"] += plan.stages[stage].update
    found["bubble"] = plan.price - sum(found.values())
    return {name: seconds for name, seconds in found.items() if seconds > ROUNDING * plan.price}


def fullest(timelines: Sequence[Timeline]) -> Timeline:
    """Return the memory of the stage that needs most."""
    return max(timelines, key=lambda each: each.highest)


def plan_of(
    costs: Sequence[Costs],
    seconds: Mapping[str, float],
    candidate: Candidate,
    timelines: Mapping[str, Sequence[Timeline]] | None = None,
) -> LayoutPlan:
    """Return the plan's file of a candidate of the first of these phases. `timelines` is the memory
    of a rank of each stage, by phase; None if there is one phase."""
    first = costs[0]
    grid, problem = candidate.grid, candidate.problem
    choices = candidate.choices
    cuts = candidate.solution.cuts
    made = assigned(problem, cuts, choices)
    hardware = first.machine.hardware
    by_phase = timelines or {first.phase.name: candidate.timelines}
    memory = fullest([each for own in by_phase.values() for each in own])
    ways = [choice.name for choice in choices]
    return LayoutPlan(
        planned=Planned(
            model=model_hash(first.model),
            gpus=grid.shape.dp * grid.layout.shards,
            hardware=f"{hardware.file.name}#{hardware.digest}",
            executable=first.module is None and not any(way.sequence for way in ways),
            module=first.module,
            phases=tuple(
                PlannedPhase(
                    name=each.phase.name,
                    seq_len=each.phase.seq_len,
                    batch_tokens=each.phase.seq_len * each.phase.batch_rows,
                    seconds=seconds[each.phase.name],
                    memory=fullest(by_phase[each.phase.name]).highest,
                )
                for each in costs
            ),
        ),
        layout=replace(grid.layout, cuts=cuts or None),
        engine=grid.engine,
        micro_batch_tokens=grid.shape.rows * first.phase.seq_len // grid.layout.cp,
        layers=tuple(_spans(ways)),
        predicted=Predicted(
            seconds=made.price,
            bound=candidate.solution.bound,
            by=time_by_part(problem, made),
            memory=memory.highest,
            memory_by=memory.parts,
            estimated=tuple(sorted(first.machine.estimated)),
        ),
    )


def _spans(ways: Sequence[Way]) -> Iterator[LayerSpan]:
    first = 0
    for (rule, reshard, sequence), alike in groupby(ways, lambda way: way.key):
        count = len(list(alike))
        yield LayerSpan(
            layers=(first, first + count - 1), recompute=rule, reshard=reshard, sequence=sequence
        )
        first += count
