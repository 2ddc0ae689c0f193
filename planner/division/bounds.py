"""Lower bounds on the step that order the search.

All stages are one pool of memory here. Linear programming bounds the time of all layers together,
and the stages share it as evenly as their schedule allows.
"""

from __future__ import annotations

import math

from .choices import hull, price_overflow
from .problem import LayerKind, Problem


def quick_bound(problem: Problem) -> float:
    """Return a lower bound on the step. Bytes beyond the memory of all stages cost seconds."""
    stages, kinds = problem.stages, problem.kinds
    counts, ends = problem.layer_counts, (problem.first, problem.last)
    in_flight = problem.min_in_flight
    min_workspace = min(choice.workspace for kind in kinds for choice in kind.choices)
    modules = problem.called_modules({*problem.layers})
    budget = sum(map(problem.stage_budget, range(stages))) - stages * min_workspace
    budget -= sum(end.state + in_flight * end.activations for end in ends)
    budget -= sum(module.state for module in modules)
    passes, excess = _min_backward(problem, in_flight, budget)
    passes += sum(end.forward + end.backward for end in ends)
    passes += sum(count * kind.forward for count, kind in zip(counts, kinds, strict=True))
    return _bound_step(problem, passes) + price_overflow(problem, excess / stages)


def _bound_step(problem: Problem, passes: float) -> float:
    """Bound the step from the seconds of a micro-batch's passes through all layers."""
    stages, m, kinds, counts = (
        problem.stages, problem.micro_batches, problem.kinds, problem.layer_counts,
    )  # fmt: skip
    if stages == 1:
        ends, modules = (problem.first, problem.last), problem.called_modules({*problem.layers})
        updates = sum(count * kind.update for count, kind in zip(counts, kinds, strict=True))
        return m * passes + updates + sum(part.update for part in (*ends, *modules))
    if problem.chunks > 1:
        # Stage s waits for s forward passes, and s backward passes follow its last one; every chunk
        # has a layer. The slowest stage takes at least the mean over stages, and at least the time
        # of the fullest stage with the fastest layers.
        fastest_layer = min(kind.forward + _fastest_backward(kind) for kind in kinds)
        mean = m * passes / stages + (stages - 1) / 2 * (fastest_layer + 2 * problem.message)
        return max(mean, m * math.ceil(len(problem.layers) / stages) * fastest_layer)
    # Stage s starts after a pass of the stages before it and then works m·t_s, so the step T is at
    # least t_0 + … + t_(s-1) + m·t_s. T is smallest where this is equal for all stages: then the
    # first s of them take T·(1 - (1 - 1/m)^s) seconds, and all of them `passes`.
    return float(passes / (1 - (1 - 1 / m) ** stages))


def _fastest_backward(kind: LayerKind) -> float:
    """Return the seconds of a layer's backward pass with its fastest choice."""
    return min(choice.backward for choice in kind.choices)


def _min_backward(problem: Problem, in_flight: int, budget: float) -> tuple[float, float]:
    """Return the minimum seconds of all backward passes, and the bytes beyond the budget."""
    seconds, excess = 0.0, -budget
    steps: list[tuple[float, float]] = []
    for kind, count in zip(problem.kinds, problem.layer_counts, strict=True):
        if count:
            kind_hull = hull(kind, in_flight, math.inf)
            assert kind_hull is not None, "a layer has choices"
            seconds += count * kind_hull.seconds
            excess += count * kind_hull.bytes
            steps += [(rate, count * saved) for rate, saved in kind_hull.segments]
    for rate, saved in sorted(steps):
        if excess <= 0:
            break
        taken = min(excess, saved)
        seconds += taken * rate
        excess -= taken
    return seconds, excess
