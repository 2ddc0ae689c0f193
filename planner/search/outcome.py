"""A search's result: candidates, best first, and the reasons for refused layouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ...models.accounting.step import Timeline
from ..division.problem import Problem, Solution
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
