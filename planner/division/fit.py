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

from .frontier import Known
from .problem import Problem, Solution
from .solve import solve

TRIES = 5
"""Amounts that are set aside, at most."""
CHANGES = 50
"""Times that the numbers of a problem may change: they change with what its solutions use."""
NEAR = 4e-3
"""Part of the budget within which two amounts are alike."""


class Counted(Protocol):
    """Memory of a stage."""

    @property
    def highest(self) -> float: ...


C = TypeVar("C", bound=Counted)
Aside = tuple[float, ...]
"""Bytes of each stage."""


@dataclass(frozen=True)
class Fit(Generic[C]):
    """A solution that fits, with the memory of each stage."""

    solution: Solution
    counted: Sequence[C]
    beyond: Aside
    """Bytes of each stage beyond the sum of its parts."""


def fit(
    problem_of: Callable[[], Problem],
    count: Callable[[Solution], Sequence[C] | None],
    ceiling: float = math.inf,
    guess: Aside = (),
) -> Fit[C] | None:
    """Return the best solution below a price that was found to fit; None without one.

    `count` returns None if the numbers of the problem have changed. A `guess` of the bytes to set
    aside, such as those of a problem that is nearly alike, saves solutions.
    """
    problem = problem_of()
    near = NEAR * problem.budget
    best: Fit[C] | None = None
    nothing: Aside = (0.0,) * problem.stages
    aside = guess or nothing
    little: Aside | None = None
    """With so much aside, the solution did not fit."""
    much: Aside | None = None
    """With so much aside it did, or there was none."""
    tries = changes = 0
    known: Known = {}
    improved = bool(guess)
    """True if less was set aside than a solution that fits had."""
    while tries < TRIES and changes < CHANGES:
        limit = ceiling if best is None else best.solution.price
        solution = solve(replace(problem, aside=aside), limit, known)
        wanted = aside
        if solution is None:
            if little is None and max(aside) <= 0.0:
                return best
            little, much = little or nothing, aside
        else:
            counted = count(solution)
            if counted is None:
                problem, changes = problem_of(), changes + 1
                continue
            sizes = [each.highest for each in counted]
            beyond = [size - plan.memory for size, plan in zip(sizes, solution.stages, strict=True)]
            if max(sizes) <= problem.budget:
                best = Fit(solution, counted, tuple(beyond))
                much, wanted = aside, best.beyond
                if improved or all(a - b <= near for a, b in zip(aside, beyond, strict=True)):
                    return best
                improved = True
            else:
                little = aside
                wanted = tuple(
                    max(a, b) if size > problem.budget else a
                    for a, b, size in zip(aside, beyond, sizes, strict=True)
                )
        tries += 1
        if little is None or much is None:
            if aside == wanted:
                return best
            aside = wanted
        elif all(m - n <= near for m, n in zip(much, little, strict=True)):
            return best
        else:
            aside = tuple((m + n) / 2 for m, n in zip(much, little, strict=True))
    return best
