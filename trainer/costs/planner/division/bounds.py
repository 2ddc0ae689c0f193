"""Bounds that prune the search: no division and no choices cost less.

They never decide. The time of a stage is bounded by linear programming: the layers that do not fit
take the choices that save most memory for each second, fractions of layers included. The time of
a step follows by a closed form of 1F1B and GPipe, which simulated steps reach or exceed:

    round trip r of stage s   passes of a micro-batch from stage s to the last one and back
    1F1B, m ≥ p - s           backward pass n = m - (p - s) of stage s ends at the earliest after
                              r·(1 + n div (p - s)) + (n mod (p - s))·(f + b), because a micro-batch
                              starts after p - s others came back; p - s - 1 backward passes follow
    GPipe                     all forward passes, a round trip, all backward passes
    any                       m·(f + b), beside the passes of earlier stages
"""

from __future__ import annotations

from functools import cached_property

import numpy as np

from .knapsack import works
from .problem import Integers, Numbers, Problem

Segment = tuple[float, int, float]
"""Seconds for each byte saved, sort, bytes saved by each layer."""


def quick_bound(problem: Problem) -> float:
    """Return a bound of the step in one pass over the sorts; infinite if nothing fits.

    All stages together have stages × budget bytes, and each keeps a micro-batch or more.
    """
    stages, m = problem.stages, problem.micro_batches
    counts = problem.counts[-1:]
    alive = problem.least_alive
    ends = problem.first, problem.last
    fixed = sum(end.held + alive * end.kept for end in ends)
    fixed += sum(module.held for module in problem.modules)
    least = min(min(c.work for c in sort.choices) for sort in problem.sorts)
    works_of = works(problem) if stages == 1 else [least]
    backward = min(
        float(
            least_backward(problem, counts, alive, stages * (problem.budget - w) - fixed, limit)[0]
        )
        for w in works_of
        for limit in [w if stages == 1 else np.inf]
    )
    total = backward + sum(end.forward + end.backward for end in ends)
    total += sum(
        float(count) * sort.forward for count, sort in zip(counts[0], problem.sorts, strict=True)
    )
    if stages == 1:
        return m * total + float(updates(problem, counts, 0)[0])
    if problem.chunks > 1:
        return _interleaved(problem, total)
    # The least of max over s (passes before stage s + m passes of stage s), messages left out.
    return float(total / (1 - (1 - 1 / m) ** stages))


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


def least_backward(
    problem: Problem, counts: Integers, alive: int, room: Numbers | float, limit: float
) -> Numbers:
    """Return the least backward time of so many layers of each sort [ranges, sorts] by linear
    programming, with choices whose work is within `limit`; infinite where they exceed the room."""
    ranges = len(counts)
    time, excess = np.zeros(ranges), np.zeros(ranges) - room
    segments: list[Segment] = []
    for number, sort in enumerate(problem.sorts):
        points = sorted(
            (choice.backward, choice.held + alive * choice.kept)
            for choice in sort.choices
            if choice.work <= limit
        )
        if not points:
            time = np.where(counts[:, number] > 0, np.inf, time)
            continue
        (fastest, memory), *rest = points
        time += counts[:, number] * fastest
        excess += counts[:, number] * memory
        # The lower hull: from each point on, the choice that saves most for each second.
        while better := [
            ((backward - fastest) / (memory - less), less, backward)
            for backward, less in rest
            if less < memory
        ]:
            rate, less, backward = min(better)
            segments.append((rate, number, memory - less))
            fastest, memory = backward, less
    for rate, number, saved in sorted(segments):
        taken = np.clip(excess, 0.0, counts[:, number] * saved)
        time += taken * rate
        excess -= taken
    slack = 1e-9 * problem.budget  # of rounding
    return np.where(excess > slack, np.inf, time)


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


class Bounds:
    """Bounds of a problem with one chunk for each stage, for all ranges [first, end) of layers."""

    def __init__(self, problem: Problem) -> None:
        assert problem.chunks == 1
        self.problem = problem
        layers = len(problem.layers)
        prefix = problem.counts
        between = prefix[None, :, :] - prefix[:, None, :]  # [first, end, sorts]
        flat = between.reshape((layers + 1) ** 2, -1)
        self.counts, index = np.unique(np.maximum(flat, 0), axis=0, return_inverse=True)
        self.index = index.reshape(layers + 1, layers + 1)
        self.empty = np.tril(np.ones((layers + 1, layers + 1), dtype=bool))
        """Ranges without a layer."""

    def room(self, stage: int) -> Numbers:
        """Bytes that the layers of a stage may take together with their greatest work."""
        problem = self.problem
        [alive] = problem.alive(stage)
        parts = list(problem.fixed(stage))
        found = problem.budget - np.zeros(len(self.counts))
        found -= sum(part.held + alive * part.kept for part in parts)
        for number, module in enumerate(problem.modules):
            found = found - module.held * calls(problem, self.counts, number)
        return found

    def works(self, stage: int) -> list[float]:
        least = max((part.work for part in self.problem.fixed(stage)), default=0.0)
        return [work for work in works(self.problem) if work >= least]

    @cached_property
    def times(self) -> Numbers:
        """[stages, first, end]: least seconds of both passes of these layers as a stage."""
        problem = self.problem
        forward = self.counts @ np.array([sort.forward for sort in problem.sorts])
        found = []
        for stage in range(problem.stages):
            [alive] = problem.alive(stage)
            room = self.room(stage)
            backward = np.full(len(self.counts), np.inf)
            for work in self.works(stage):
                each = least_backward(problem, self.counts, alive, room - work, work)
                backward = np.minimum(backward, each)
            fixed = sum(part.forward + part.backward for part in problem.fixed(stage))
            found.append(np.where(self.empty, np.inf, (forward + backward + fixed)[self.index]))
        return np.array(found)

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
    m, behind = problem.micro_batches, problem.stages - stage
    fits = np.isfinite(trip)
    trip, own, backward = (np.where(fits, each, 0.0) for each in (trip, own, backward))
    if problem.schedule == "gpipe":
        found = (m - 1) * own + trip
    elif m < behind:
        found = np.maximum(m * own, trip)
    else:
        rounds, turns = divmod(m - behind, behind)
        chained = trip * (1 + rounds) + turns * own + (behind - 1) * backward
        found = np.maximum(m * own, chained)
    bound: Numbers = np.where(fits, found, np.inf)
    return bound


def least_memory(problem: Problem) -> float:
    """Return the least bytes of the fullest stage over all divisions and choices; one chunk for
    each stage."""
    bounds = Bounds(problem)
    layers = len(problem.layers)
    rest = np.full(layers + 1, np.inf)
    rest[layers] = 0.0
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
        rest = np.maximum(here, rest[None, :]).min(axis=1)
    return float(rest[0])
