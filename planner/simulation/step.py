"""The simulated step of a plan: passes of all stages, events of a pass, memory, slow parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from ...models.accounting.level import Moment
from ...trainer.layout.schedules import Kind
from ...trainer.layout.simulate import Timeline, simulate
from ..division.assigned import PricedDivision, price_division
from ..division.problem import Problem, StagePlan, orders
from ..prices.layers import Costs
from ..search.assemble import PhasePlan, match_choices
from .slow import Slow, SlowMachine


@dataclass(frozen=True)
class Step:
    """A simulated step."""

    timeline: Timeline
    updates: tuple[float, ...]
    """Seconds of each stage after its last pass."""

    @property
    def ends(self) -> list[float]:
        spans = self.timeline.spans
        return [each[-1].end + more for each, more in zip(spans, self.updates, strict=True)]

    @property
    def seconds(self) -> float:
        return max(self.ends)


class Simulation:
    """Simulates steps of one plan."""

    def __init__(self, costs: Costs, made: PhasePlan, budget: float) -> None:
        self.costs, self.budget = costs, budget
        self.grid, self.problem, self.plan, self.timelines = made

    @cached_property
    def step(self) -> Step:
        return self._step(self.plan.stages, self._hops)

    @property
    def memory(self) -> int:
        """Bytes of the fullest stage at its highest moment."""
        return self.timelines[self.fullest].highest

    @cached_property
    def moments(self) -> list[Sequence[Moment]]:
        """Memory of a rank of each stage over the whole step."""
        ways = [choice.name for choice in self.plan.choices]
        found = self.costs.timelines(self.grid, self.plan.cuts, ways, every=True)
        return [timeline.moments for timeline in found]

    @cached_property
    def busiest(self) -> int:
        """Stage that computes most."""
        busy = [sum(stage.forward) + sum(stage.backward) for stage in self.plan.stages]
        return busy.index(max(busy))

    @cached_property
    def fullest(self) -> int:
        sizes = [timeline.highest for timeline in self.timelines]
        return sizes.index(max(sizes))

    @property
    def stage_ranks(self) -> int:
        """Ranks of a stage; stages are the outermost axis."""
        layout = self.grid.layout
        return self.grid.shape.dp * layout.cp * layout.tp

    def slowed(self, slow: Slow, micro_batches: int | None = None) -> Step:
        """Simulate the step with a slow rank or link.

        All ranks of a stage wait for the slow one: tensor and context ranks at each message, and
        data-parallel ranks at the next gather or at the sum of the gradients.
        """
        slow_stage, p = slow.rank // self.stage_ranks, self.problem.stages
        problem, plan = self._on(slow)
        stages = list(self.plan.stages)
        stages[slow_stage] = plan.stages[slow_stage]
        hops = [
            problem.message if slow_stage in (chunk % p, (chunk + 1) % p) else self.problem.message
            for chunk in range(self.problem.all_chunks - 1)
        ]
        return self._step(stages, hops, micro_batches)

    def shortened(self, micro_batches: int) -> Step:
        """Simulate a step of other micro-batches, for a drawing."""
        return self._step(self.plan.stages, self._hops, micro_batches)

    @property
    def _hops(self) -> list[float]:
        return [self.problem.message] * (self.problem.all_chunks - 1)

    def _on(self, slow: Slow) -> tuple[Problem, PricedDivision]:
        """Return the problem and the plan of a cluster that is slow everywhere."""
        costs = self.costs.on(SlowMachine(self.costs.machine, slow.part, slow.factor))
        simulated = any(choice.name.sequence for choice in self.plan.choices)
        problem = costs.problem(self.grid, self.budget, simulate=simulated, all_choices=True)
        choices = match_choices(problem, self.plan.choices)
        return problem, price_division(problem, self.plan.cuts, choices)

    def _step(
        self, stages: Sequence[StagePlan], hops: Sequence[float], micro_batches: int | None = None
    ) -> Step:
        p = self.problem
        costs: dict[Kind, list[float]] = {"forward": [], "backward": []}
        for chunk in range(p.all_chunks):
            stage, place = stages[chunk % p.stages], chunk // p.stages
            costs["forward"].append(stage.forward[place])
            costs["backward"].append(stage.backward[place])
        order = orders(p.schedule, p.stages, p.chunks, micro_batches or p.micro_batches)
        return Step(simulate(order, costs, hops), tuple(stage.update for stage in stages))
