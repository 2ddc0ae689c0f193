"""Solve a problem until the solution fits by its timelines.

A problem's bytes add up over layers. Some memory does not: whole weights and buffers of
neighbouring layers, gradients that replace activations. So timelines count every solution. The
excess over the sum is set aside by stage, and the problem is solved again: with a larger reserve if
the solution does not fit, with a smaller one if the reserve was not needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from ...trainer.layout.cuts import Cuts
from .knapsack import FrontierCache
from .problem import Problem, Solution
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
    """A solution that fits, with its memory by stage."""

    solution: Solution
    timelines: Sequence[C]
    excess: Reserved
    """Bytes beyond the sum, by stage."""


def fit(
    build_problem: Callable[[], Problem],
    measure: Callable[[Solution], Sequence[C] | None],
    ceiling: float = math.inf,
    guess: Reserved = (),
) -> Fit[C] | None:
    """Return the best solution below the price `ceiling` that fits by its timelines, or None.

    `measure` returns None if the problem has changed. A `guess` of the reserve, such as a similar
    problem's, saves tries.
    """
    problem = build_problem()
    near = NEAR * problem.budget
    best: Fit[C] | None = None
    no_reserve: Reserved = (0.0,) * problem.stages
    reserved = guess or no_reserve
    insufficient: Reserved | None = None
    """Largest reserve with a solution that does not fit."""
    sufficient: Reserved | None = None
    """Smallest reserve with a solution that fits, or with none."""
    num_tries = num_changes = 0
    cache: FrontierCache = {}
    start: Cuts | None = None
    improved = bool(guess)
    """True if the reserve was reduced after a solution that fits."""
    while num_tries < TRIES and num_changes < CHANGES:
        limit = ceiling if best is None else best.solution.price
        solution = solve(replace(problem, reserved=reserved), limit, cache, start)
        next_reserved = reserved
        if solution is None:
            if insufficient is None and max(reserved) <= 0.0:
                return best
            insufficient, sufficient = insufficient or no_reserve, reserved
        else:
            start = solution.cuts
            timelines = measure(solution)
            if timelines is None:
                problem, num_changes = build_problem(), num_changes + 1
                continue
            sizes = [timeline.highest for timeline in timelines]
            excess = [size - plan.memory for size, plan in zip(sizes, solution.stages, strict=True)]
            if max(sizes) <= problem.budget:
                best = Fit(solution, timelines, tuple(excess))
                sufficient, next_reserved = reserved, best.excess
                if improved or all(a - b <= near for a, b in zip(reserved, excess, strict=True)):
                    return best
                improved = True
            else:
                insufficient = reserved
                next_reserved = tuple(
                    max(a, b) if size > problem.budget else a
                    for a, b, size in zip(reserved, excess, sizes, strict=True)
                )
        num_tries += 1
        if insufficient is None or sufficient is None:
            if reserved == next_reserved:
                return best
            reserved = next_reserved
        elif all(m - n <= near for m, n in zip(sufficient, insufficient, strict=True)):
            return best
        else:
            reserved = tuple((m + n) / 2 for m, n in zip(sufficient, insufficient, strict=True))
    return best
