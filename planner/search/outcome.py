"""What a search returns: candidates, best first, and why layouts were left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...models.accounting.step import Timeline
from ..division.problem import Choice, Problem, Solution
from ..grid.grid import Grid


@dataclass(frozen=True)
class Candidate:
    """A plan of the search."""

    grid: Grid
    problem: Problem
    solution: Solution
    timelines: Sequence[Timeline]
    """Memory over a step of a rank of each stage."""
    given: Sequence[Choice] | None = None
    """Choice of each layer, where the sum of the bytes did not decide."""

    @property
    def choices(self) -> list[Choice]:
        """Choice of each layer."""
        return choices_of(self.problem, self.solution) if self.given is None else [*self.given]


@dataclass
class Outcome:
    """Result of a search."""

    candidates: list[Candidate] = field(default_factory=list)
    """Best first."""
    refused: Counter[str] = field(default_factory=Counter)
    """Reasons of layouts that cannot run, with their number."""
    shapes: int = 0
    grids: int = 0
    solved: int = 0
    """Grids whose divisions were searched."""
    undecided: list[Grid] = field(default_factory=list)
    """Layouts of which neither a plan that fits nor the proof that none does was found. Filled
    only without candidates."""
    states: int = 0
    """Grids whose state alone exceeds the budget."""


def choices_of(problem: Problem, solution: Solution) -> list[Choice]:
    """Return the choice of each layer. Of layers that are alike the first ones take the choices
    that work with most memory: later layers have given theirs back by then."""
    ranges = problem.ranges(solution.cuts)
    found: list[Choice | None] = [None] * len(problem.layers)
    for stage, plan in enumerate(solution.stages):
        for chunk, counts in zip(problem.own(stage), plan.counts, strict=True):
            waiting = {
                sort: _in_turn(problem, sort, numbers) for sort, numbers in enumerate(counts)
            }
            for layer in range(*ranges[chunk]):
                found[layer] = waiting[problem.layers[layer]].pop(0)
    return [choice for choice in found if choice is not None]


def _in_turn(problem: Problem, sort: int, numbers: Sequence[int]) -> list[Choice]:
    pairs = zip(problem.sorts[sort].choices, numbers, strict=True)
    return sorted((choice for choice, n in pairs for _ in range(n)), key=lambda each: -each.work)
