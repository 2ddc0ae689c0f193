"""Bounds that prune the search: no division and no choices cost less.

They never decide. The time of a stage is bounded by linear programming (linear.py). The time of a
step follows by a closed form of the schedule, which simulated steps reach or exceed.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from ...trainer.layout.cuts import Cuts
from .linear import ROUNDING, least_backward, least_of_limits, least_seconds, limits_of
from .problem import Flags, Integers, Numbers, Problem


def quick_bound(problem: Problem) -> float:
    """Return a bound of the step in one pass over the sorts; infinite if nothing fits.

    All stages together have stages × budget bytes, and each keeps a micro-batch or more.
    """
    stages, alive, counts = problem.stages, problem.least_alive, problem.numbers
    least = min(c.work for sort in problem.sorts for c in sort.choices)
    room = sum(map(problem.room, range(stages))) - stages * least - _fixed(problem, alive)
    parts = [(sort, count, alive) for sort, count in enumerate(counts)]
    return _of_backward(problem, least_seconds(problem, parts, room))


def fastest_bound(problem: Problem) -> float:
    """Return `quick_bound` for any memory: by the fastest choice of each layer."""
    each = zip(problem.numbers, problem.sorts, strict=True)
    return _of_backward(
        problem, sum(count * min(c.backward for c in sort.choices) for count, sort in each)
    )


def _of_backward(problem: Problem, backward: float) -> float:
    """Return the bound of the step by the seconds of all backward passes of a micro-batch."""
    stages, m, counts = problem.stages, problem.micro_batches, problem.numbers
    total = backward + _forward(problem, counts)
    if stages == 1:
        return m * total + _update(problem, counts)
    if problem.chunks > 1:
        return _interleaved(problem, total)
    # The least of max over s (passes before stage s + m passes of stage s), messages left out.
    return float(total / (1 - (1 - 1 / m) ** stages))


def stage_alone(problem: Problem) -> float:
    """Return the bound of a step of one stage: that of `quick_bound`, with the working set of the
    choices that are taken."""
    counts, fixed = problem.numbers, _fixed(problem, 1)
    parts = [(sort, count, 1) for sort, count in enumerate(counts)]
    limits = limits_of(problem, set(problem.layers), max(problem.first.work, problem.last.work))
    backward = least_of_limits(problem, parts, problem.room(0) - fixed, limits)
    total = backward + _forward(problem, counts)
    return problem.micro_batches * total + _update(problem, counts)


def _fixed(problem: Problem, alive: int) -> float:
    """Return the bytes of both ends and of all modules that layers call."""
    ends = problem.first, problem.last
    found = sum(end.held + alive * end.kept for end in ends)
    return found + sum(module.held for module in problem.called)


def _forward(problem: Problem, counts: Sequence[int]) -> float:
    """Return the seconds of the forward passes, and of both passes of the ends."""
    ends = problem.first, problem.last
    found = sum(end.forward + end.backward for end in ends)
    return found + sum(
        count * sort.forward for count, sort in zip(counts, problem.sorts, strict=True)
    )


def _update(problem: Problem, counts: Sequence[int]) -> float:
    """Return the seconds of the only stage outside its passes."""
    found = sum(count * sort.update for count, sort in zip(counts, problem.sorts, strict=True))
    found += sum(module.update for module in problem.called)
    return found + problem.first.update + problem.last.update


def _interleaved(problem: Problem, total: float) -> float:
    """Return the bound of chunks that stages take in turn.

    Stage s waits for the forward passes of s chunks, and s backward passes follow its last one;
    each chunk has a layer. The mean of the stages is at most the slowest one.
    """
    stages, m = problem.stages, problem.micro_batches
    least = min(sort.forward + min(c.backward for c in sort.choices) for sort in problem.sorts)
    mean = m * total / stages + (stages - 1) / 2 * (least + 2 * problem.message)
    most = -(-len(problem.layers) // stages)
    return max(mean, m * most * least)


def updates(problem: Problem, counts: Integers, stage: int) -> Numbers:
    """Return the seconds of a stage outside its passes, for each range of layers."""
    each = np.array([sort.update for sort in problem.sorts])
    fixed = sum(part.update for chunk in problem.own(stage) for part in problem.fixed(chunk))
    found: Numbers = counts @ each + fixed
    for number, module in enumerate(problem.modules):
        found = found + module.update * calls(problem, counts, number)
    return found


def calls(problem: Problem, counts: Integers, module: int) -> Numbers:
    """Return 1 for each range with a layer that calls the module, else 0."""
    users = np.array([sort.module == module for sort in problem.sorts])
    found: Numbers = (counts[:, users].sum(axis=1) > 0).astype(np.float64)
    return found


@lru_cache(maxsize=64)
def _ranges(layers: tuple[int, ...], sorts: int, longest: int) -> tuple[Integers, Integers, Flags]:
    """Return the different counts of layers of each sort in a range of at most `longest` layers,
    the position of each range's counts, and [first, end]: ranges without a layer, or too long."""
    one = np.eye(sorts, dtype=np.int64)[list(layers)]
    prefix = np.concatenate([np.zeros((1, sorts), dtype=np.int64), one.cumsum(axis=0)])
    ends = np.arange(len(prefix))
    lengths = ends - ends[:, None]
    none = (lengths <= 0) | (lengths > longest)
    between = np.where(none[:, :, None], 0, prefix[None, :, :] - prefix[:, None, :])
    counts, index = np.unique(between.reshape(-1, sorts), axis=0, return_inverse=True)
    return counts, index.reshape(none.shape), none


class Bounds:
    """Bounds of a problem with one chunk for each stage, for all ranges [first, end) of layers."""

    def __init__(self, problem: Problem) -> None:
        assert problem.chunks == 1
        self.problem = problem
        longest = len(problem.layers) - problem.stages + 1
        self.counts, self.index, self.empty = _ranges(problem.layers, len(problem.sorts), longest)

    def room(self, stage: int) -> Numbers:
        """Bytes that the layers of a stage may take together with their greatest work."""
        problem = self.problem
        [alive] = problem.alive(stage)
        parts = list(problem.fixed(stage))
        found = problem.room(stage) - np.zeros(len(self.counts))
        found -= sum(part.held + alive * part.kept for part in parts)
        for number, module in enumerate(problem.modules):
            found = found - module.held * calls(problem, self.counts, number)
        return found

    def works(self, stage: int) -> list[float]:
        least = max((part.work for part in self.problem.fixed(stage)), default=0.0)
        return limits_of(self.problem, set(self.problem.layers), least)

    @cached_property
    def times(self) -> Numbers:
        """[stages, first, end]: least seconds of both passes of these layers as a stage."""
        problem = self.problem
        forward = self.counts @ np.array([sort.forward for sort in problem.sorts])
        found = []
        for stage in range(problem.stages):
            [alive] = problem.alive(stage)
            backward = self._backward(stage, alive)
            fixed = sum(part.forward + part.backward for part in problem.fixed(stage))
            found.append(np.where(self.empty, np.inf, (forward + backward + fixed)[self.index]))
        return np.array(found)

    def _backward(self, stage: int, alive: int) -> Numbers:
        """Return the least seconds of the backward passes of each range of layers."""
        problem, room = self.problem, self.room(stage)
        greatest, *others = reversed(self.works(stage))
        found = least_backward(problem, self.counts, alive, room - greatest, greatest)
        for work in others:
            # Where the fastest choices fit beside the greatest work, no limit of it is better.
            [open_] = np.nonzero(found > self.fastest)
            if not len(open_):
                break
            each = least_backward(problem, self.counts[open_], alive, room[open_] - work, work)
            found[open_] = np.minimum(found[open_], each)
        return found

    @cached_property
    def fastest(self) -> Numbers:
        """Seconds of the backward passes of each range with the fastest choices."""
        each = np.array([min(c.backward for c in sort.choices) for sort in self.problem.sorts])
        found: Numbers = (self.counts @ each) * (1 + ROUNDING)
        return found

    @cached_property
    def forward(self) -> Numbers:
        """[stages, first, end]: seconds of a forward pass."""
        problem = self.problem
        layers = self.counts @ np.array([sort.forward for sort in problem.sorts])
        return np.array(
            [
                (layers + sum(part.forward for part in problem.fixed(stage)))[self.index]
                for stage in range(problem.stages)
            ]
        )

    @cached_property
    def rest(self) -> Numbers:
        """[stages + 1, first]: bound of the stages from one on, if they begin with this layer."""
        self._fill()
        return self._rest

    @cached_property
    def alone(self) -> Numbers:
        """[stages, first, end]: bound of a step from the first to the last pass of a stage."""
        self._fill()
        return self._alone

    def _fill(self) -> None:
        problem = self.problem
        p, layers = problem.stages, len(problem.layers)
        times, hop = self.times, 2 * problem.message
        rest = np.full((p + 1, layers + 1), np.inf)
        trips = np.full((p + 1, layers + 1), np.inf)
        rest[p, layers] = trips[p, layers] = 0.0
        alone = np.empty_like(times)
        for stage in reversed(range(p)):
            own = times[stage]
            between = hop if stage < p - 1 else 0.0
            trip = own + between + trips[stage + 1][None, :]
            trips[stage] = trip.min(axis=1)
            alone[stage] = stage_bound(problem, stage, own, own - self.forward[stage], trip)
            whole = np.maximum(alone[stage], own + between + rest[stage + 1][None, :])
            rest[stage] = whole.min(axis=1)
        self._rest, self._alone = rest, alone

    @cached_property
    def first_updates(self) -> Numbers:
        """[end]: seconds of the first stage outside its passes, if it ends before this layer."""
        found: Numbers = updates(self.problem, self.counts, 0)[self.index[0]]
        return found

    def bound(self) -> float:
        """Return the bound of all divisions."""
        own = self.times[0, 0]
        between = 2 * self.problem.message if self.problem.stages > 1 else 0.0
        whole = np.maximum(self.alone[0, 0], own + between + self.rest[1])
        return float((whole + self.first_updates).min())


def stage_bound(
    problem: Problem, stage: int, own: Numbers, backward: Numbers, trip: Numbers
) -> Numbers:
    """Return the bound of a step from the first to the last pass of a stage, by the seconds of its
    passes, of its backward pass, and of a round trip."""
    fits = np.isfinite(trip)
    trip, own, backward = (np.where(fits, each, 0.0) for each in (trip, own, backward))
    depth = problem.stages - stage
    found = problem.schedule.bound(problem.micro_batches, depth, own, backward, trip)
    bound: Numbers = np.where(fits, found, np.inf)
    return bound


def least_memory(problem: Problem) -> float:
    """Return the least bytes of the fullest stage over all divisions and choices; one chunk for
    each stage."""
    return least_cuts(problem)[0]


def least_cuts(problem: Problem) -> tuple[float, Cuts]:
    """Return the least bytes of the fullest stage, and cuts that reach them."""
    bounds = Bounds(problem)
    layers = len(problem.layers)
    rest = np.full(layers + 1, np.inf)
    rest[layers] = 0.0
    ends: list[Integers] = []
    for stage in reversed(range(problem.stages)):
        [alive] = problem.alive(stage)
        least = np.full(len(bounds.counts), np.inf)
        for work in bounds.works(stage):
            total = np.full(len(bounds.counts), work, dtype=np.float64)
            for number, sort in enumerate(problem.sorts):
                sizes = [c.held + alive * c.kept for c in sort.choices if c.work <= work]
                count = bounds.counts[:, number]
                total += count * min(sizes) if sizes else np.where(count > 0, np.inf, 0.0)
            least = np.minimum(least, total)
        least += problem.budget - bounds.room(stage)
        here = np.where(bounds.empty, np.inf, least[bounds.index])
        both = np.maximum(here, rest[None, :])
        rest = both.min(axis=1)
        ends.append(both.argmin(axis=1))
    first, cuts = 0, []
    for end in reversed(ends):
        first = int(end[first])
        cuts.append(first)
    return float(rest[0]), tuple(cuts[:-1])
