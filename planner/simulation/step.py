"""A plan's simulated step: passes of all stages, memory, slow parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ...models.accounting.level import Moment
from ...trainer.layout.schedules import Kind
from ...trainer.layout.simulate import StepTimeline, simulate
from ..division.problem import Division, Problem, StagePlan, price_division
from ..prices.layers import Costs
from ..search.assemble import PhasePlan, match_choices
from .slow import Slowdown, SlowMachine


@dataclass(frozen=True)
class SimulatedStep:
    """The passes of all stages, then their updates."""

    timeline: StepTimeline
    updates: tuple[float, ...]
    """Seconds after a stage's last pass, by stage."""

    @property
    def ends(self) -> list[float]:
        spans = self.timeline.spans
        return [passes[-1].end + update for passes, update in zip(spans, self.updates, strict=True)]

    @property
    def seconds(self) -> float:
        return max(self.ends)


class Simulation:
    """Simulates steps of a plan."""

    def __init__(self, costs: Costs, phase_plan: PhasePlan, budget: float) -> None:
        self.costs, self.budget = costs, budget
        self.grid, self.problem, self.plan, self.timelines = phase_plan

    @cached_property
    def step(self) -> SimulatedStep:
        return self._step(self.plan.stages, self._hops)

    @property
    def memory(self) -> int:
        """Bytes on the fullest stage at its highest moment."""
        return self.timelines[self.fullest].highest

    @cached_property
    def moments(self) -> list[Sequence[Moment]]:
        """A rank's memory over the step, by stage."""
        layer_plans = [choice.name for choice in self.plan.choices]
        timelines = self.costs.timelines(self.grid, self.plan.cuts, layer_plans, every=True)
        return [timeline.moments for timeline in timelines]

    @cached_property
    def busiest(self) -> int:
        """Stage that computes longest."""
        seconds = [sum(stage.forward) + sum(stage.backward) for stage in self.plan.stages]
        return seconds.index(max(seconds))

    @cached_property
    def fullest(self) -> int:
        sizes = [timeline.highest for timeline in self.timelines]
        return sizes.index(max(sizes))

    @property
    def stage_ranks(self) -> int:
        """Ranks in a stage; stages are the outermost axis."""
        layout = self.grid.layout
        return self.grid.shape.dp * layout.cp * layout.tp

    def slow_down(self, slowdown: Slowdown, micro_batches: int | None = None) -> SimulatedStep:
        """Simulate the step with a slow rank or link.

        All ranks in its stage wait: tensor and context ranks at every message, data-parallel ranks
        at the next gather or gradient sum.
        """
        slow_stage, p = slowdown.rank // self.stage_ranks, self.problem.stages
        problem, plan = self._price_slow_cluster(slowdown)
        stages = list(self.plan.stages)
        stages[slow_stage] = plan.stages[slow_stage]
        hops = [
            problem.message if slow_stage in (chunk % p, (chunk + 1) % p) else self.problem.message
            for chunk in range(self.problem.all_chunks - 1)
        ]
        return self._step(stages, hops, micro_batches)

    def shorten(self, micro_batches: int) -> SimulatedStep:
        """Simulate a step with fewer micro-batches, for a drawing."""
        return self._step(self.plan.stages, self._hops, micro_batches)

    @property
    def _hops(self) -> list[float]:
        return [self.problem.message] * (self.problem.all_chunks - 1)

    def _price_slow_cluster(self, slowdown: Slowdown) -> tuple[Problem, Division]:
        """Return the problem and the plan on a cluster that is slow everywhere."""
        machine = SlowMachine(self.costs.machine, slowdown.part, slowdown.factor)
        costs = self.costs.replace_machine(machine)
        is_simulated = any(choice.name.sequence for choice in self.plan.choices)
        problem = costs.problem(self.grid, self.budget, simulate=is_simulated, all_choices=True)
        choices = match_choices(problem, self.plan.choices)
        return problem, price_division(problem, self.plan.cuts, choices)

    def _step(
        self, stages: Sequence[StagePlan], hops: Sequence[float], micro_batches: int | None = None
    ) -> SimulatedStep:
        p = self.problem
        costs: dict[Kind, list[float]] = {"forward": [], "backward": []}
        for chunk in range(p.all_chunks):
            stage, position = stages[chunk % p.stages], chunk // p.stages
            costs["forward"].append(stage.forward[position])
            costs["backward"].append(stage.backward[position])
        order = p.schedule.orders(p.stages, p.chunks, micro_batches or p.micro_batches)
        return SimulatedStep(simulate(order, costs, hops), tuple(stage.update for stage in stages))
