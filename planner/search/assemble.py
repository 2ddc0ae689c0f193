"""Build plan files from solutions: choices by layer, time and memory by part."""

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
)
from ..division.problem import Choice, Division, Problem
from ..grid.grid import Grid
from ..prices.forms import LayerPlan
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
"""Parts of a step by name, with their meaning."""

ROUNDING = 1e-9
"""Fraction of a step below which a part is a rounding error."""


class PhasePlan(NamedTuple):
    """A plan as a phase runs it."""

    grid: Grid
    problem: Problem
    plan: Division
    timelines: Sequence[Timeline]
    """A rank's memory over a step, by stage."""

    @property
    def key(self) -> tuple[Any, ...]:
        """All choices, without their costs."""
        return self.grid, self.plan.cuts, tuple(choice.name.key for choice in self.plan.choices)


def build_phase_plan(candidate: Candidate) -> PhasePlan:
    """Return a candidate as its own phase runs it."""
    return PhasePlan(candidate.grid, candidate.problem, candidate.solution, candidate.timelines)


def match_choices(problem: Problem, choices: Sequence[Choice]) -> list[Choice]:
    """Return the problem's choices that run layers like the choices from another phase."""
    matches = []
    for kind, choice in zip(problem.layers, choices, strict=True):
        by_key = {candidate.name.key: candidate for candidate in problem.kinds[kind].choices}
        matches.append(by_key[choice.name.key])
    return matches


def time_by_part(problem: Problem, plan: Division) -> dict[str, float]:
    """Return the busiest stage's seconds by part; they add up to the price."""
    m, ranges = problem.micro_batches, problem.ranges(plan.cuts)
    compute_times = [sum(stage.forward) + sum(stage.backward) for stage in plan.stages]
    busiest = max(range(problem.stages), key=lambda stage: compute_times[stage])
    by_part: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    for chunk in problem.stage_chunks(busiest):
        for layer in range(*ranges[chunk]):
            layer_plan: LayerPlan = plan.choices[layer].name
            for pass_parts in (layer_plan.forward, layer_plan.backward):
                for part, seconds in pass_parts.items():
                    by_part[part] += m * seconds
        for end in problem.end_costs(chunk):
            by_part["ends"] += m * (end.forward + end.backward)
    by_part["update"] += plan.stages[busiest].update
    by_part["bubble"] = plan.price - sum(by_part.values())
    return {part: seconds for part, seconds in by_part.items() if seconds > ROUNDING * plan.price}


def peak_timeline(timelines: Sequence[Timeline]) -> Timeline:
    """Return the timeline with the highest peak memory."""
    return max(timelines, key=lambda timeline: timeline.highest)


def build_layout_plan(
    costs: Sequence[Costs],
    seconds: Mapping[str, float],
    candidate: Candidate,
    timelines: Mapping[str, Sequence[Timeline]] | None = None,
) -> LayoutPlan:
    """Return the plan file for a candidate of the first phase.

    `costs` has the phases that the plan serves, `seconds` their step times, and `timelines` a
    rank's memory by phase and stage; None for a single phase.
    """
    first = costs[0]
    grid, problem, division = candidate.grid, candidate.problem, candidate.solution
    hardware = first.machine.hardware
    by_phase = timelines or {first.phase.name: candidate.timelines}
    memory = peak_timeline([timeline for stages in by_phase.values() for timeline in stages])
    layer_plans = [choice.name for choice in division.choices]
    return LayoutPlan(
        planned=Planned(
            model=first.model_hash,
            gpus=grid.shape.dp * grid.layout.shards,
            hardware=f"{hardware.file.name}#{hardware.digest}",
            executable=first.module is None and not any(plan.sequence for plan in layer_plans),
            module=first.module,
            precision=first.run.precision,
            optimizer=first.run.optimizer.kind,
            device=first.device,
            phases=tuple(
                PlannedPhase(
                    name=phase.name,
                    seq_len=phase.seq_len,
                    batch_tokens=phase.seq_len * phase.batch_rows,
                    seconds=seconds[phase.name],
                    memory=peak_timeline(by_phase[phase.name]).highest,
                )
                for phase in (phase_costs.phase for phase_costs in costs)
            ),
        ),
        layout=replace(grid.layout, cuts=division.cuts or None),
        engine=grid.engine,
        micro_batch_tokens=grid.shape.rows * first.phase.seq_len // grid.layout.cp,
        layers=tuple(_group_layers(layer_plans)),
        predicted=Predicted(
            seconds=division.price,
            bound=division.bound,
            by=time_by_part(problem, division),
            memory=memory.highest,
            memory_by=memory.parts,
            estimated=tuple(sorted(first.machine.estimated)),
            outside=find_outside(first, grid),
            error=find_band(first, grid),
        ),
    )


def find_outside(costs: Costs, grid: Grid) -> tuple[str, ...]:
    """Name the rates that the layout takes from the nearest measured size, which is far."""
    machine = costs.machine.renew()
    costs.replace_machine(machine).passes(grid.shape.split, grid.layout.ep)
    return tuple(f"{kind} ({size})" for kind, size in sorted(machine.outside.items()))


def find_band(costs: Costs, grid: Grid) -> float | None:
    """Return the relative error of seconds that the hardware file has for such runs: the largest of
    those that apply. None if it has none."""
    operators = [] if costs.module else list(costs.model.operators.values())
    kinds = {
        "dense": True,
        "fp8": costs.machine.fp8 is not None,
        "context": grid.layout.cp > 1,
        "experts": any(o.expert_count for o in operators),
        "hybrids": any(
            not options.tokenwise and not options.attention_heads for options in operators
        ),
    }
    bands = costs.machine.hardware.file.bands
    return max((band.error for band in bands if kinds[band.runs]), default=None)


def _group_layers(layer_plans: Sequence[LayerPlan]) -> Iterator[LayerSpan]:
    first = 0
    for (rule, reshard, sequence), equal_plans in groupby(layer_plans, lambda plan: plan.key):
        count = len(list(equal_plans))
        yield LayerSpan(
            layers=(first, first + count - 1), recompute=rule, reshard=reshard, sequence=sequence
        )
        first += count
