"""Mean steps of phases whose steps have rows of several lengths."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ..console.progress import format_seconds
from ..trainer.run.layout_plan import PlannedMean
from .search.outcome import Candidate

if TYPE_CHECKING:
    from ..dataplane.order.timeline import PhaseRows
    from .search.make import Plans
    from .search.priced_run import PricedRun

Batch = tuple[int, int]
"""Tokens of a row, and rows of a step: a plan's price depends on nothing else of a phase."""


@dataclass(frozen=True)
class MeanStep:
    """Steps of a phase, by the length of their rows."""

    phase: str
    shares: Mapping[int, float]
    """Shares of the steps, by length."""
    seconds: Mapping[int, float]
    """Seconds of a step, by length."""

    @property
    def mean(self) -> float:
        return sum(share * self.seconds[length] for length, share in self.shares.items())

    def describe(self) -> str:
        steps = ", ".join(
            f"{100 * share:.3g}% of the steps have rows of {length:,} tokens "
            f"({format_seconds(self.seconds[length])})"
            for length, share in self.shares.items()
        )
        return f"{self.phase}: {format_seconds(self.mean)} a step on average; {steps}"

    def dump(self) -> dict[str, Any]:
        """Return the mean for JSON."""
        steps = [
            {"seq_len": length, "share": share, "seconds": self.seconds[length]}
            for length, share in self.shares.items()
        ]
        return {"phase": self.phase, "seconds": self.mean, "steps": steps}


def average_steps(
    phases: Sequence[PhaseRows], seconds: Mapping[Batch, float]
) -> Iterator[MeanStep]:
    """Yield the mean of each phase with steps by length whose lengths all have `seconds`."""
    lengths_by_phase: dict[str, list[PhaseRows]] = {}
    for phase in phases:
        if phase.whole is not phase:
            lengths_by_phase.setdefault(phase.whole.name, []).append(phase)
    for name, lengths in lengths_by_phase.items():
        if all(find_batch(phase) in seconds for phase in lengths):
            steps = sum(phase.steps for phase in lengths)
            yield MeanStep(
                name,
                {phase.seq_len: phase.steps / steps for phase in lengths},
                {phase.seq_len: seconds[find_batch(phase)] for phase in lengths},
            )


def average_plans(plans: Plans) -> list[MeanStep]:
    """Return the means with the plan that serves all phases."""
    phases = [phase.costs.phase for phase in plans.phases]
    prices = [phase_plan.plan.price for phase_plan in plans.best_in_phases]
    if len(phases) == 1:
        prices = [plans.phases[0].best.solution.price]
    if len(prices) < len(phases):  # no plan serves all
        return []
    pairs = zip(map(find_batch, phases), prices, strict=True)
    return list(average_steps(plans.request.phases, dict(pairs)))


def store_means(plans: Plans) -> Plans:
    """Return the plans with the means in the one that serves all phases."""
    if plans.best is None:
        return plans
    means = tuple(PlannedMean(phase=m.phase, seconds=m.mean) for m in average_plans(plans))
    planned = replace(plans.best.planned, means=means)
    return replace(plans, best=replace(plans.best, planned=planned))


def average_explained(plans: Plans, explained: Sequence[tuple[Any, Any]]) -> list[MeanStep]:
    """Return the means with the plans that have settings, each length with its own."""
    seconds = {
        find_batch(search.costs.phase): answer.solution.price
        for search, answer in explained
        if isinstance(answer, Candidate)
    }
    return list(average_steps(plans.request.phases, seconds))


def average_priced(phases: Sequence[PhaseRows], priced: Sequence[PricedRun]) -> list[MeanStep]:
    """Return the means with a run's own layout."""
    seconds = {find_batch(run.phase): run.seconds for run in priced}
    return list(average_steps(phases, seconds))


def find_batch(phase: PhaseRows) -> Batch:
    return phase.seq_len, phase.batch_rows
