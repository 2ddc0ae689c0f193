"""Solve a problem until the solution fits by its timelines.

A problem's bytes add up over layers. Some memory does not: whole weights and buffers of
neighbouring layers, gradients that replace activations. So timelines count every solution. Where
they exceed the budget, their excess over the sum is set aside by stage, and the problem is solved
again; once a solution fits, its own excess is set aside once more, which may be less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from .problem import Problem, Solution
from .program import Start
from .solve import solve

TRIES = 5
"""Maximum number of reserves tried."""
CHANGES = 50
"""How often the problem may change: tracing what a solution uses changes it."""
NEAR = 4e-3
"""Fraction of the budget within which two reserves are equal."""


class StageMemory(Protocol):
    """A stage's memory."""

    @property
    def highest(self) -> float: ...


C = TypeVar("C", bound=StageMemory)
Reserved = tuple[float, ...]
"""Bytes by stage."""


@dataclass(frozen=True)
class Fit(Generic[C]):
    """A solution with its memory by stage."""

    solution: Solution
    timelines: Sequence[C]
    excess: Reserved
    """Bytes beyond the sum, by stage."""
    fits: bool
    """False: the solution with the smallest sum exceeds the budget, too."""


def fit(
    build_problem: Callable[[], Problem],
    measure: Callable[[Solution], Sequence[C] | None],
    ceiling: float = math.inf,
    guess: Reserved = (),
    start: Start | None = None,
) -> Fit[C] | None:
    """Return the best solution below the price `ceiling` that fits by its timelines; one that does
    not, if none fits; None if none is below the ceiling.

    `measure` returns None if the problem has changed. A `guess` of the reserve, such as a similar
    problem's, saves tries, and so does a `start` for the cuts.
    """
    problem = build_problem()
    no_reserve: Reserved = (0.0,) * problem.stages
    reserved, next_reserved = no_reserve, guess or no_reserve
    best: Fit[C] | None = None
    num_tries = num_changes = 0
    while num_tries < TRIES and num_changes < CHANGES:
        reserved = next_reserved
        limit = best.solution.price if best and best.fits else ceiling
        solution = solve(replace(problem, reserved=reserved), limit, start)
        if solution is None:
            break
        timelines = measure(solution)
        if timelines is None:
            problem, num_changes = build_problem(), num_changes + 1
            continue
        num_tries += 1
        sums = [plan.memory for plan in solution.stages]
        sizes = [timeline.highest for timeline in timelines]
        excess = tuple(size - total for size, total in zip(sizes, sums, strict=True))
        fits = max(sizes) <= problem.budget
        was_fitting = best is not None and best.fits
        if fits or not was_fitting:
            best = Fit(solution, timelines, excess, fits)
        if was_fitting:
            break
        if fits or any(m + n > problem.budget for m, n in zip(sums, reserved, strict=True)):
            next_reserved = excess
        else:
            next_reserved = tuple(
                max(a, b) if size > problem.budget else a
                for a, b, size in zip(reserved, excess, sizes, strict=True)
            )
        near = NEAR * problem.budget if fits else 0.0
        if all(abs(a - b) <= near for a, b in zip(reserved, next_reserved, strict=True)):
            break
    return best
