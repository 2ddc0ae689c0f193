"""A search's result: candidates, best first, and the reasons for refused layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...models.accounting.step import Timeline
from ..division.problem import Choice, Problem, Solution
from ..grid.grid import Grid
from .ideas import Idea


@dataclass(frozen=True)
class Candidate:
    """A finished plan: a grid's division, priced by events."""

    grid: Grid
    problem: Problem
    solution: Solution
    timelines: Sequence[Timeline]
    """A rank's memory over a step, by stage."""
    assigned_choices: Sequence[Choice] | None = None
    """A choice for every layer, if timelines decided instead of added bytes."""

    @property
    def choices(self) -> list[Choice]:
        """A choice for every layer."""
        if self.assigned_choices is None:
            return choices_by_layer(self.problem, self.solution)
        return [*self.assigned_choices]

    @property
    def is_fastest(self) -> bool:
        """True if memory costs no time: each layer has the fastest choice of its kind."""
        kinds = self.problem.kinds
        fastest = [min(choice.backward for choice in kind.choices) for kind in kinds]
        pairs = zip(self.problem.layers, self.choices, strict=True)
        return all(choice.backward <= fastest[kind] for kind, choice in pairs)


@dataclass
class SearchOutcome:
    candidates: list[Candidate] = field(default_factory=list)
    """Best first."""
    by_idea: dict[Idea, Candidate] = field(default_factory=dict)
    """The best candidate of each idea that was searched."""
    kinds: set[str] = field(default_factory=set)
    """Kinds of parallelism that the searched shapes may have."""
    refused: Counter[str] = field(default_factory=Counter)
    """Reasons why layouts cannot run, with counts."""
    shapes: int = 0
    """Degrees of parallelism that were bounded."""
    grids: int = 0
    """Layouts of the shapes whose bounds were promising."""
    solved: int = 0
    """Grids with searched divisions."""
    nearest: Candidate | None = None
    """The plan that exceeds the budget least; None with candidates."""
    states: int = 0
    """Grids where the state alone exceeds the budget."""

    @property
    def ideas(self) -> list[Candidate]:
        """The best candidates of different ideas, best first."""
        return sorted(self.by_idea.values(), key=lambda candidate: candidate.solution.price)

    @property
    def all_candidates(self) -> list[Candidate]:
        return [*self.candidates, *self.by_idea.values()]

    def best_with(self, kind: str) -> Candidate | None:
        """Return the best candidate with a kind of parallelism; None without one."""
        candidates = (c for idea, c in self.by_idea.items() if kind in idea.kinds)
        return min(candidates, key=lambda c: c.solution.price, default=None)


def choices_by_layer(problem: Problem, solution: Solution) -> list[Choice]:
    """Assign a choice to every layer.

    Among identical layers, the largest workspaces go first: later layers run their backward pass,
    and free memory, before them.
    """
    layer_ranges = problem.ranges(solution.cuts)
    choices: list[Choice | None] = [None] * len(problem.layers)
    for stage, stage_plan in enumerate(solution.stages):
        for chunk, counts_by_kind in zip(
            problem.stage_chunks(stage), stage_plan.counts, strict=True
        ):
            queues = {
                kind: _sort_by_workspace(problem, kind, counts)
                for kind, counts in enumerate(counts_by_kind)
            }
            for layer in range(*layer_ranges[chunk]):
                choices[layer] = queues[problem.layers[layer]].pop(0)
    return [choice for choice in choices if choice is not None]


def _sort_by_workspace(problem: Problem, kind: int, counts: Sequence[int]) -> list[Choice]:
    """Return the chosen choices, one per layer, largest workspace first."""
    pairs = zip(problem.kinds[kind].choices, counts, strict=True)
    choices = (choice for choice, count in pairs for _ in range(count))
    return sorted(choices, key=lambda choice: -choice.workspace)
