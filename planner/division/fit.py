"""Solutions whose counted memory fits.

The bytes of a problem add up over layers, and a part of the memory does not: whole weights and
buffers of neighbouring layers, gradients that come while activations go. So a solution is counted,
by the timeline of its step. What a stage has beyond the sum is set aside, and the problem is solved
again: with more aside if the solution does not fit, with less if that much was not needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from .frontier import FrontierCache
from .problem import Problem, Solution
from .solve import solve

TRIES = 5
"""Amounts that are set aside, at most."""
CHANGES = 50
"""Times that the numbers of a problem may change: they change with what its solutions use."""
NEAR = 4e-3
"""Part of the budget within which two amounts are alike."""


class StageMemory(Protocol):
    """Memory of a stage."""

    @property
    def highest(self) -> float: ...


C = TypeVar("C", bound=StageMemory)
Reserved = tuple[float, ...]
"""Bytes of each stage."""


@dataclass(frozen=True)
class Fit(Generic[C]):
    """A solution that fits, with the memory of each stage."""

    solution: Solution
    timelines: Sequence[C]
    excess: Reserved
    """Bytes of each stage beyond the sum of its parts."""


def fit(
    build_problem: Callable[[], Problem],
    measure: Callable[[Solution], Sequence[C] | None],
    ceiling: float = math.inf,
    guess: Reserved = (),
) -> Fit[C] | None:
    """Return the best solution below a price that was found to fit; None without one.

    `measure` returns None if the numbers of the problem have changed. A `guess` of the bytes to set
    aside, such as those of a problem that is nearly alike, saves solutions.
    """
    problem = build_problem()
    near = NEAR * problem.budget
    best: Fit[C] | None = None
    no_reserve: Reserved = (0.0,) * problem.stages
    reserved = guess or no_reserve
    insufficient: Reserved | None = None
    """With so much aside, the solution did not fit."""
    sufficient: Reserved | None = None
    """With so much aside it did, or there was none."""
    num_tries = num_changes = 0
    cache: FrontierCache = {}
    improved = bool(guess)
    """True if less was set aside than a solution that fits had."""
    while num_tries < TRIES and num_changes < CHANGES:
        limit = ceiling if best is None else best.solution.price
        solution = solve(replace(problem, reserved=reserved), limit, cache)
        next_reserved = reserved
        if solution is None:
            if insufficient is None and max(reserved) <= 0.0:
                return best
            insufficient, sufficient = insufficient or no_reserve, reserved
        else:
            timelines = measure(solution)
            if timelines is None:
                problem, num_changes = build_problem(), num_changes + 1
                continue
            sizes = [each.highest for each in timelines]
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
