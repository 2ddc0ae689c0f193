"""Results of a search: candidates, best first, and the reasons for refused layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...models.accounting.step import Timeline
from ..division.problem import Choice, Problem, Solution
from ..grid.grid import Grid


@dataclass(frozen=True)
class Candidate:
    """A finished plan: a division of a grid, priced by events."""

    grid: Grid
    problem: Problem
    solution: Solution
    timelines: Sequence[Timeline]
    """Memory of a rank over a step, by stage."""
    assigned_choices: Sequence[Choice] | None = None
    """A choice for every layer, if timelines decided instead of sums of bytes."""

    @property
    def choices(self) -> list[Choice]:
        """A choice for every layer."""
        if self.assigned_choices is None:
            return choices_by_layer(self.problem, self.solution)
        return [*self.assigned_choices]


@dataclass
class Outcome:
    """Result of a search."""

    candidates: list[Candidate] = field(default_factory=list)
    """Best first."""
    refused: Counter[str] = field(default_factory=Counter)
    """Reasons why layouts cannot run, with counts."""
    shapes: int = 0
    grids: int = 0
    solved: int = 0
    """Number of grids whose divisions were searched."""
    undecided: list[Grid] = field(default_factory=list)
    """Layouts with neither a fitting plan nor a proof that none fits. Filled only without
    candidates."""
    states: int = 0
    """Number of grids whose state alone exceeds the budget."""


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
                kind: _largest_workspace_first(problem, kind, counts)
                for kind, counts in enumerate(counts_by_kind)
            }
            for layer in range(*layer_ranges[chunk]):
                choices[layer] = queues[problem.layers[layer]].pop(0)
    return [choice for choice in choices if choice is not None]


def _largest_workspace_first(problem: Problem, kind: int, counts: Sequence[int]) -> list[Choice]:
    pairs = zip(problem.kinds[kind].choices, counts, strict=True)
    choices = (choice for choice, count in pairs for _ in range(count))
    return sorted(choices, key=lambda choice: -choice.workspace)
