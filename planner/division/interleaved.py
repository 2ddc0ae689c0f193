"""Divisions of interleaved schedules, whose stages have several chunks: bounds, and what fits.

No dynamic program divides the layers here: the chunks of a stage share its memory, and are not
neighbours. So divisions are bounded one by one, and the least memory follows from a search of cuts,
chunk by chunk, which leaves out what cannot fit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from ...trainer.layout.cuts import Cuts, even
from .linear import Parts, least_of_limits, least_seconds, limits_of
from .problem import Choice, Problem

Counts = tuple[tuple[int, ...], ...]
"""Layers of each sort, by chunk of a stage."""
NODES = 100_000
"""Most beginnings of divisions that a search of the least memory tries: one or two seconds."""


class Stages:
    """Bounds of the stages of a problem by their layers; remembers what it has computed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._seconds: dict[tuple[int, Counts], float] = {}
        self._bytes: dict[tuple[int, Counts], float] = {}

    def counts(self, first: int, end: int) -> tuple[int, ...]:
        before, after = self.prefix[first], self.prefix[end]
        return tuple(b - a for a, b in zip(before, after, strict=True))

    @cached_property
    def prefix(self) -> list[list[int]]:
        found: list[list[int]] = self.problem.counts.tolist()
        return found

    def seconds(self, stage: int, counts: Counts, enough: float = -math.inf) -> float:
        """Return a bound of the backward passes of a stage's layers, infinite if nothing fits; or
        any number that is at least the bound, and at most `enough`."""
        key = stage, counts
        if key not in self._seconds:
            room, least = self._room(stage, counts)
            parts = self._parts(stage, counts)
            limits = self._limits(parts, least)
            fast = least_seconds(self.problem, parts, room - limits[-1], limits[-1])
            if fast <= enough:
                return fast
            self._seconds[key] = least_of_limits(self.problem, parts, room, limits)
        return self._seconds[key]

    def bytes(self, stage: int, counts: Counts) -> float:
        """Return the least bytes of a stage with these layers."""
        key = stage, counts
        if key not in self._bytes:
            room, least = self._room(stage, counts)
            parts = self._parts(stage, counts)
            used = self.problem.budget - room
            self._bytes[key] = used + min(
                work + sum(n * self._least(sort, alive, work) for sort, n, alive in parts)
                for work in self._limits(parts, least)
            )
        return self._bytes[key]

    def parts(self, stage: int, counts: Counts) -> dict[str, float]:
        """Return the least bytes of a stage by part: state, activations, working set."""
        problem, least = self.problem, self.bytes(stage, counts)
        room, least_work = self._room(stage, counts)
        layers = self._parts(stage, counts)
        for work in self._limits(layers, least_work):
            chosen = [(n, alive, self._smallest(sort, alive, work)) for sort, n, alive in layers]
            if any(choice is None for _, _, choice in chosen):
                continue
            kept = sum(n * alive * c.kept for n, alive, c in chosen if c is not None)
            held = sum(n * c.held for n, _, c in chosen if c is not None)
            if math.isclose(problem.budget - room + held + kept + work, least):
                break
        ends = [
            alive * part.kept
            for chunk, alive in zip(problem.own(stage), problem.alive(stage), strict=True)
            for part in problem.fixed(chunk)
        ]
        kept += sum(ends)
        return {"state": least - kept - work, "activations": kept, "working": work}

    def _limits(self, parts: Parts, least: float) -> list[float]:
        return limits_of(self.problem, {sort for sort, *_ in parts}, least)

    def _smallest(self, sort: int, alive: int, work: float) -> Choice | None:
        """Return the choice of least bytes with work within a limit; None without one."""
        choices = [c for c in self.problem.sorts[sort].choices if c.work <= work]
        return min(choices, key=lambda c: c.held + alive * c.kept, default=None)

    def _least(self, sort: int, alive: int, work: float) -> float:
        choice = self._smallest(sort, alive, work)
        return math.inf if choice is None else choice.held + alive * choice.kept

    def _parts(self, stage: int, counts: Counts) -> list[tuple[int, int, int]]:
        alive = self.problem.alive(stage)
        return [
            (sort, count, n)
            for n, by_sort in zip(alive, counts, strict=True)
            for sort, count in enumerate(by_sort)
            if count
        ]

    def _room(self, stage: int, counts: Counts) -> tuple[float, float]:
        """Return the bytes for layers and work, and the least work."""
        problem = self.problem
        room, least = problem.room(stage), 0.0
        for chunk, alive in zip(problem.own(stage), problem.alive(stage), strict=True):
            for part in problem.fixed(chunk):
                room -= part.held + alive * part.kept
                least = max(least, part.work)
        called = {
            problem.sorts[sort].module
            for by_sort in counts
            for sort, count in enumerate(by_sort)
            if count
        }
        room -= sum(module.held for n, module in enumerate(problem.modules) if n in called)
        return room, least


class DivisionBound:
    """Bound of one division: the passes of each stage within its memory, and those of the chunks
    before its first one, without recompute. Infinite if a stage does not fit."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.stages = Stages(problem)
        times = _least_times(problem)
        times[0] += problem.first.forward + problem.first.backward
        times[-1] += problem.last.forward + problem.last.backward
        self.sums = list(accumulate(times, initial=0.0))
        self._known: dict[Cuts, float] = {}

    def __call__(self, cuts: Cuts, ceiling: float = math.inf) -> float:
        """Return the bound, or a lower one that reaches the ceiling."""
        if cuts not in self._known:
            fast = self._fast(cuts)
            if fast >= ceiling:
                return fast
            found = self._bound(cuts, ceiling)
            if ceiling <= found < math.inf:
                return found
            self._known[cuts] = found
        return self._known[cuts]

    def _fast(self, cuts: Cuts) -> float:
        """Return the bound without the memory."""
        problem, ranges = self.problem, self.problem.ranges(cuts)
        chunks = [self.sums[end] - self.sums[first] for first, end in ranges]
        found = before = 0.0
        for stage in range(problem.stages):
            own = sum(chunks[chunk] for chunk in problem.own(stage))
            found = max(found, before + problem.micro_batches * own)
            before += chunks[stage] + 2 * problem.message
        return found

    def _bound(self, cuts: Cuts, ceiling: float) -> float:
        problem, m = self.problem, self.problem.micro_batches
        ranges = problem.ranges(cuts)
        found = before = 0.0
        for stage in range(problem.stages):
            own = [ranges[chunk] for chunk in problem.own(stage)]
            counts = tuple(self.stages.counts(*each) for each in own)
            seconds = 0.0
            for by_sort in counts:
                seconds += sum(
                    n * sort.forward for n, sort in zip(by_sort, problem.sorts, strict=True)
                )
            for chunk in problem.own(stage):
                seconds += sum(part.forward + part.backward for part in problem.fixed(chunk))
            hidden = (found - before) / m - seconds  # such a stage is not the slowest
            seconds += self.stages.seconds(stage, counts, hidden)
            found = max(found, before + m * seconds)
            if found >= ceiling:
                return found
            first, end = ranges[stage]
            before += self.sums[end] - self.sums[first] + 2 * problem.message
        return found


def interleaved_estimate(problem: Problem, ceiling: float) -> float:
    """Return the bound of the divisions that the search begins with; infinite if none fits, any
    number from the ceiling on if none is below it."""
    bound = DivisionBound(problem)
    least = math.inf
    for cuts in starts(problem):
        least = min(least, bound(cuts, min(least, ceiling)))
    return least


def starts(problem: Problem) -> set[Cuts]:
    """Return divisions into equal numbers of layers, equal times and equal memory."""
    chunks, layers = problem.all_chunks, len(problem.layers)
    least = [min(c.held + problem.stages * c.kept for c in sort.choices) for sort in problem.sorts]
    sizes, times = [least[sort] for sort in problem.layers], _least_times(problem)
    times[-1] += problem.last.forward + problem.last.backward
    return {even(layers, chunks), balanced(times, chunks), balanced(sizes, chunks)}


def _least_times(problem: Problem) -> list[float]:
    least = [sort.forward + min(c.backward for c in sort.choices) for sort in problem.sorts]
    return [least[sort] for sort in problem.layers]


def balanced(costs: Sequence[float], chunks: int) -> Cuts:
    """Return cuts where the sum of the costs passes equal parts of the total."""
    sums = list(accumulate(costs, initial=0.0))
    cuts: list[int] = []
    for chunk in range(1, chunks):
        near = bisect_left(sums, sums[-1] * chunk / chunks)
        least = (cuts[-1] if cuts else 0) + 1
        cuts.append(min(max(near, least), len(costs) - (chunks - chunk)))
    return tuple(cuts)


@dataclass(frozen=True)
class Least:
    """The division whose fullest stage needs the least bytes."""

    bytes: float
    cuts: Cuts | None
    """None if no division below the ceiling was found."""
    complete: bool
    """True if no other division needs less, or it needs little enough."""
    nodes: int = 0
    """Beginnings that were tried."""


def least_division(
    problem: Problem, ceiling: float = math.inf, enough: float = 0.0, most: int = NODES
) -> Least:
    """Return the division of least memory below `ceiling`; the first one of at most `enough`.

    Cuts are tried chunk by chunk. A beginning is left out if a stage already has too much, or if
    the mean of all stages has too much with the layers that are left.
    """
    stages, layers, chunks = Stages(problem), len(problem.layers), problem.all_chunks
    none = (0,) * len(problem.sorts)
    after = _sizes_after(problem)
    best, nodes = ceiling, 0
    cuts: Cuts | None = None
    empty = tuple((none,) * problem.chunks for _ in range(problem.stages))
    begin = tuple(stages.bytes(stage, counts) for stage, counts in enumerate(empty))
    todo: list[tuple[Cuts, tuple[float, ...], tuple[Counts, ...]]] = [((), begin, empty)]
    while todo and nodes < most:
        done, sizes, counts = todo.pop()
        nodes += 1
        chunk, first = len(done), done[-1] if done else 0
        if max(*sizes, (sum(sizes) + after[chunk][first]) / problem.stages) >= best:
            continue
        if chunk == chunks:
            best, cuts = max(sizes), done[:-1]
            if best <= enough:
                break
            continue
        stage = chunk % problem.stages
        rest = chunks - chunk - 1
        following = []
        for end in range(first + 1, layers - rest + 1) if rest else [layers]:
            own = list(counts[stage])
            own[chunk // problem.stages] = stages.counts(first, end)
            size = stages.bytes(stage, tuple(own))
            if size >= best:  # more layers need more
                break
            share = after[chunk][first] / (rest + 1)
            off = abs(after[chunk][first] - after[chunk][end] - share)
            mine = (
                (*sizes[:stage], size, *sizes[stage + 1 :]),
                (*counts[:stage], tuple(own), *counts[stage + 1 :]),
            )
            following.append((off, ((*done, end), *mine)))
        following.sort(key=lambda each: -each[0])  # the last one is taken first
        todo += [node for _, node in following]
    return Least(best, cuts, best <= enough or not todo, nodes)


def fullest(problem: Problem, cuts: Cuts) -> tuple[int, dict[str, float]]:
    """Return the stage of a division that needs most, with its least bytes by part."""
    stages, ranges = Stages(problem), problem.ranges(cuts)
    counts = [
        tuple(stages.counts(*ranges[chunk]) for chunk in problem.own(stage))
        for stage in range(problem.stages)
    ]
    most = max(range(problem.stages), key=lambda stage: stages.bytes(stage, counts[stage]))
    return most, stages.parts(most, counts[most])


def _sizes_after(problem: Problem) -> list[list[float]]:
    """Return [chunk][layer]: the least bytes of the layers from this one on, in chunks from this
    one on."""
    alive = [
        problem.alive(chunk % problem.stages)[chunk // problem.stages]
        for chunk in range(problem.all_chunks)
    ]
    found = []
    for chunk in range(problem.all_chunks):
        least = min(alive[chunk:])
        sizes = [min(c.held + least * c.kept for c in sort.choices) for sort in problem.sorts]
        back = accumulate((sizes[sort] for sort in reversed(problem.layers)), initial=0.0)
        found.append(list(back)[::-1])
    return [*found, [0.0] * (len(problem.layers) + 1)]
