"""Lower bounds on the step that order the search.

All stages are one pool of memory here. Linear programming bounds the time of all layers together,
and the stages share it as evenly as their schedule allows.
"""

from __future__ import annotations

import math

from .choices import hull, price_overflow
from .problem import Problem


def quick_bound(problem: Problem) -> float:
    """Return a lower bound on the step. Bytes beyond the memory of all stages cost seconds."""
    stages, kinds = problem.stages, problem.all_kinds
    counts: list[int] = problem.counts[-1].tolist()
    in_flight = min(min(problem.in_flight(stage)) for stage in range(stages))
    min_workspace = min(choice.workspace for kind in problem.kinds for choice in kind.choices)
    modules = problem.called_modules(kind for kind, n in zip(kinds, counts, strict=True) if n)
    excess = stages * min_workspace - sum(map(problem.stage_budget, range(stages)))
    excess += sum(module.state for module in modules)
    passes, steps = 0.0, []
    for kind, count in zip(kinds, counts, strict=True):
        if count:
            kind_hull = hull(kind, in_flight)
            passes += count * (kind.forward + kind_hull.seconds)
            excess += count * kind_hull.bytes
            steps += [(rate, count * saved) for rate, saved in kind_hull.segments]
    for rate, saved in sorted(steps):
        if excess <= 0:
            break
        passes += min(excess, saved) * rate
        excess -= saved
    penalty = price_overflow(problem, excess / stages)
    if stages == 1:
        updates = sum(count * kind.update for count, kind in zip(counts, kinds, strict=True))
        updates += sum(module.update for module in modules)
        return problem.micro_batches * passes + updates + penalty
    return _bound_pipeline(problem, passes) + penalty


def _bound_pipeline(problem: Problem, passes: float) -> float:
    """Bound the step from the seconds of a micro-batch's passes through all layers."""
    stages, m = problem.stages, problem.micro_batches
    if problem.chunks > 1:
        # Stage s waits for s forward passes, and s backward passes follow its last one; every chunk
        # has a layer. The slowest stage takes at least the mean over stages, and at least the time
        # of the fullest stage with the fastest layers.
        fastest_layer = min(kind.fastest for kind in problem.kinds)
        mean = m * passes / stages + (stages - 1) / 2 * (fastest_layer + 2 * problem.message)
        return max(mean, m * math.ceil(len(problem.layers) / stages) * fastest_layer)
    # Stage s starts after a pass of the stages before it and then works m·t_s, so the step T is at
    # least t_0 + … + t_(s-1) + m·t_s. T is smallest where this is equal for all stages: then the
    # first s of them take T·(1 - (1 - 1/m)^s) seconds, and all of them `passes`.
    return float(passes / (1 - (1 - 1 / m) ** stages))
