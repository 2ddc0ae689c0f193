"""The choices of a stage's layers: least backward time within the memory. Exact.

Layers of a sort are alike, so the choices of a stage are counts: how many layers of a sort run in
each way. Memory has a part that adds up over layers and a greatest part (`work`): for each limit of
the greatest part, the choices within it add up, and the Pareto frontier of memory and time of
several layers follows from those of fewer.

A frontier of many layers has too many points, so it is thinned first, which gives a time that may
be a little too long. If it may, the exact frontiers are made of the points that can still be part
of a shorter time: by linear programming, each byte is worth `rate` seconds, and a selection that
wastes more than the gap between that bound and the known time is in no better solution.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .linear import ROUNDING, least_rate, least_seconds, limits_of
from .problem import Integers, Numbers, Problem, StagePlan

POINTS = 300
"""Most selections of layers that are alike, in the first of two passes."""
Ranges = Sequence[tuple[int, int]]
"""First and end of each chunk of a stage."""


@dataclass(frozen=True)
class Frontier:
    """Selections of choices, none of which is better than another in both memory and time."""

    memory: Numbers
    time: Numbers
    counts: Integers
    """[selections, choices]: layers of each choice."""
    whole: bool = True
    """False if points were left out."""


Known = dict[tuple[int, int, int, float], Frontier | None]
"""Frontiers by sort, micro-batches alive, layers, and limit of the work."""
Items = Sequence[tuple[int, int, int, int]]
"""Chunk, sort, micro-batches alive, and layers."""


class Prune:
    """Exact frontiers without the selections that waste more than a gap."""

    def __init__(self, rate: float, base: Mapping[tuple[int, int], float], gap: float) -> None:
        """`rate` are seconds for a byte; `base` the least seconds with their bytes of a layer."""
        self.rate, self.base, self.gap = rate, base, gap
        self.known: Known = {}

    def joined(self, a: Frontier, b: Frontier, sort: int, alive: int) -> Frontier:
        """Return the frontier of layers of one sort from those of fewer."""
        base = self.base[sort, alive]
        of_a, of_b = (
            each.time + self.rate * each.memory - base * each.counts.sum(axis=1) for each in (a, b)
        )
        order = np.argsort(of_b, kind="stable")
        numbers = np.searchsorted(of_b[order], self.gap - of_a, side="right")
        one = np.repeat(np.arange(len(of_a)), numbers)
        begins = np.repeat(np.cumsum(numbers) - numbers, numbers)
        other = order[np.arange(len(one)) - begins]
        memory, time = a.memory[one] + b.memory[other], a.time[one] + b.time[other]
        chosen = _best_of(memory, time)
        counts = a.counts[one[chosen]] + b.counts[other[chosen]]
        return Frontier(memory[chosen], time[chosen], counts)


class Knapsack:
    """Best choices of the stages of a problem; remembers what it has computed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        alike: dict[tuple[object, ...], int] = {}
        self.same = [
            alike.setdefault(
                tuple((c.backward, c.held, c.kept, c.work) for c in sort.choices), number
            )
            for number, sort in enumerate(problem.sorts)
        ]
        """First sort with the same choices, by sort: calls of different shared blocks are alike."""
        self._stages: dict[tuple[object, ...], StagePlan | None] = {}
        self._alike: Known = {}
        self._prune: Prune | None = None
        self._thin = False
        """True if a frontier of the last selection was thinned."""

    def stage(self, stage: int, ranges: Ranges) -> StagePlan | None:
        """Return the best plan of a stage; None if its layers do not fit into the memory."""
        counts = [self._counts(first, end) for first, end in ranges]
        key = (stage, *counts)
        if key not in self._stages:
            self._stages[key] = self._best(stage, counts)
        return self._stages[key]

    def _counts(self, first: int, end: int) -> tuple[int, ...]:
        prefix = self.problem.counts
        return tuple(int(n) for n in prefix[end] - prefix[first])

    def _best(self, stage: int, counts: Sequence[tuple[int, ...]]) -> StagePlan | None:
        problem = self.problem
        own, alive = problem.own(stage), problem.alive(stage)
        fixed = [list(problem.fixed(chunk)) for chunk in own]
        modules = {
            sort.module
            for by_sort in counts
            for sort, count in zip(problem.sorts, by_sort, strict=True)
            if count and sort.module is not None
        }
        held = sum(each.held for parts in fixed for each in parts)
        held += sum(problem.modules[number].held for number in modules)
        kept = sum(n * each.kept for n, parts in zip(alive, fixed, strict=True) for each in parts)
        update = sum(each.update for parts in fixed for each in parts)
        update += sum(problem.modules[number].update for number in modules)
        update += sum(
            count * sort.update
            for by_sort in counts
            for sort, count in zip(problem.sorts, by_sort, strict=True)
        )
        least_work = max((each.work for parts in fixed for each in parts), default=0.0)
        together: dict[tuple[int, int], int] = {}
        for chunk, by_sort in enumerate(counts):
            for sort, count in enumerate(by_sort):
                if count:
                    key = chunk, self.same[sort]
                    together[key] = together.get(key, 0) + count
        items = [(chunk, sort, alive[chunk], n) for (chunk, sort), n in together.items()]
        items.sort(key=lambda item: item[-1])  # the longest frontier is not joined, but searched
        room = problem.room(stage) - held - kept
        best = self._fastest(items, room, least_work)
        for bound, work in [] if best is not None else self._limits(items, room, least_work):
            if math.isinf(bound) or (best is not None and bound >= best[0]):
                break
            selection = self._shortest(items, room - work, work, bound)
            if selection is not None and (best is None or selection[0] < best[0]):
                best = (selection[0], selection[1] + work, selection[2])
        if best is None:
            return None
        _, memory, chosen = best
        split: list[list[tuple[int, ...]]] = [
            [(0,) * len(sort.choices) for sort in problem.sorts] for _ in own
        ]
        forward = [sum(each.forward for each in parts) for parts in fixed]
        backward = [sum(each.backward for each in parts) for parts in fixed]
        left: dict[tuple[int, int], list[int]] = {}
        start = 0
        for chunk, sort, *_ in items:
            end = start + len(problem.sorts[sort].choices)
            left[chunk, sort] = [int(n) for n in chosen[start:end]]
            start = end
        for chunk, by_sort in enumerate(counts):
            for sort, count in enumerate(by_sort):
                if not count:
                    continue
                split[chunk][sort] = numbers = _take(left[chunk, self.same[sort]], count)
                forward[chunk] += count * problem.sorts[sort].forward
                choices = problem.sorts[sort].choices
                backward[chunk] += sum(
                    n * choice.backward for n, choice in zip(numbers, choices, strict=True)
                )
        return StagePlan(
            tuple(forward),
            tuple(backward),
            update,
            held + kept + memory,
            tuple(map(tuple, split)),
        )

    def _limits(
        self, items: Sequence[tuple[int, int, int, int]], room: float, least: float
    ) -> list[tuple[float, float]]:
        """Return bounds of the time, least first, with the limit of the work that each is for."""
        parts = [(sort, count, alive) for _, sort, alive, count in items]
        limits = limits_of(self.problem, {sort for sort, *_ in parts}, least)
        return sorted(
            (least_seconds(self.problem, parts, room - work, work), work) for work in limits
        )

    def _fastest(
        self, items: Sequence[tuple[int, int, int, int]], room: float, least_work: float
    ) -> tuple[float, float, Integers] | None:
        """Return the fastest choice of every layer, if all of them fit."""
        time = memory = 0.0
        work, chosen = least_work, []
        for _, sort, alive, count in items:
            choices = self.problem.sorts[sort].choices
            numbers = range(len(choices))
            sizes = [choice.held + alive * choice.kept for choice in choices]
            number = min(numbers, key=lambda n, c=choices, s=sizes: (c[n].backward, s[n]))  # type: ignore[misc]
            time += count * choices[number].backward
            memory += count * sizes[number]
            work = max(work, choices[number].work)
            chosen += [count * (n == number) for n in numbers]
        if memory + work > room:
            return None
        return time, memory + work, np.array(chosen, dtype=np.int64)

    def _shortest(
        self, items: Items, room: float, work: float, bound: float
    ) -> tuple[float, float, Integers] | None:
        """Return the least time within the room, whose bound by linear programming is known."""
        self._thin = False
        first = self._select(items, room, work)
        if first is None or not self._thin or first[0] <= bound * (1 + ROUNDING):
            return first
        parts = [(sort, count, alive) for _, sort, alive, count in items]
        rate = least_rate(self.problem, parts, room, work)
        base = {
            (sort, alive): min(
                choice.backward + rate * (choice.held + alive * choice.kept)
                for choice in self.problem.sorts[sort].choices
                if choice.work <= work
            )
            for _, sort, alive, _ in items
        }
        least = sum(count * base[sort, alive] for _, sort, alive, count in items) - rate * room
        gap = first[0] - least + ROUNDING * first[0]
        self._prune = Prune(rate, base, gap)
        try:
            found = self._select(items, room, work)
        finally:
            self._prune = None
        return first if found is None or first[0] <= found[0] else found

    def _select(
        self, items: Sequence[tuple[int, int, int, int]], room: float, work: float
    ) -> tuple[float, float, Integers] | None:
        """Return the least time within the room: time, memory, counts of each item in turn."""
        whole = Frontier(np.zeros(1), np.zeros(1), np.zeros((1, 0), dtype=np.int64))
        *others, (_, sort, alive, count) = items
        for _, other_sort, other_alive, other_count in others:
            frontier = self._of_sort(other_sort, other_alive, other_count, work)
            if frontier is None:
                return None
            whole = joined(whole, frontier, room)
        last = self._of_sort(sort, alive, count, work)
        if last is None:
            return None
        # Of the last sort, the fastest selection that fits beside each of the others.
        beside = np.searchsorted(last.memory, room - whole.memory, side="right") - 1
        [fits] = np.nonzero(beside >= 0)
        if not len(fits):
            return None
        times = whole.time[fits] + last.time[beside[fits]]
        one = fits[times.argmin()]
        other = beside[one]
        counts = np.concatenate([whole.counts[one], last.counts[other]])
        return float(times.min()), float(whole.memory[one] + last.memory[other]), counts

    def _of_sort(self, sort: int, alive: int, count: int, work: float) -> Frontier | None:
        """Return the frontier of so many layers of a sort; None if no choice is within `work`."""
        key = (sort, alive, count, work)
        known = self._alike if self._prune is None else self._prune.known
        if key not in known:
            known[key] = self._multiply(sort, alive, count, work)
        found = known[key]
        self._thin |= found is not None and not found.whole
        return found

    def _multiply(self, sort: int, alive: int, count: int, work: float) -> Frontier | None:
        if count == 1:
            choices = self.problem.sorts[sort].choices
            within = [n for n, choice in enumerate(choices) if choice.work <= work]
            if not within:
                return None
            memory = np.array([choices[n].held + alive * choices[n].kept for n in within])
            time = np.array([choices[n].backward for n in within])
            return _pareto(memory, time, np.eye(len(choices), dtype=np.int64)[within])
        half = self._of_sort(sort, alive, count // 2, work)
        rest = self._of_sort(sort, alive, count - count // 2, work)
        if half is None or rest is None:
            return None
        if self._prune is None:
            return _thinned(joined(half, rest, np.inf, alike=True))
        return self._prune.joined(half, rest, sort, alive)


def _take(numbers: list[int], count: int) -> tuple[int, ...]:
    """Take so many layers from those of each choice."""
    found = []
    for place, n in enumerate(numbers):
        taken = min(n, count)
        numbers[place] -= taken
        count -= taken
        found.append(taken)
    return tuple(found)


def joined(a: Frontier, b: Frontier, room: float, *, alike: bool = False) -> Frontier:
    """Return the frontier of a selection of each; `alike`: of layers of one sort."""
    memory = (a.memory[:, None] + b.memory).ravel()
    time = (a.time[:, None] + b.time).ravel()
    if room < np.inf:
        [fits] = np.nonzero(memory <= room)
        chosen = fits[_best_of(memory[fits], time[fits])]
    else:
        chosen = _best_of(memory, time)
    of_a, of_b = np.divmod(chosen, len(b.memory))
    one, other = a.counts[of_a], b.counts[of_b]
    counts = one + other if alike else np.concatenate([one, other], axis=1)
    return Frontier(memory[chosen], time[chosen], counts, a.whole and b.whole)


def _thinned(whole: Frontier) -> Frontier:
    """Return the fastest selection of each of `POINTS` equal spans of the memory."""
    if len(whole.memory) <= POINTS:
        return whole
    least, most = whole.memory[0], whole.memory[-1]
    span = np.minimum((whole.memory - least) / (most - least) * POINTS, POINTS - 1).astype(int)
    last = np.append(span[1:] != span[:-1], True)  # times fall with the memory
    last[0] = True
    return Frontier(whole.memory[last], whole.time[last], whole.counts[last], whole=False)


def _pareto(memory: Numbers, time: Numbers, counts: Integers) -> Frontier:
    chosen = _best_of(memory, time)
    return Frontier(memory[chosen], time[chosen], counts[chosen])


def _best_of(memory: Numbers, time: Numbers) -> Integers:
    """Return the entries that are faster than all others of as little memory, in rising order."""
    order = np.argsort(memory, kind="stable")  # quick: sums of two frontiers are rising runs
    least = np.minimum.accumulate(time[order])
    faster = order[np.append(True, least[1:] < least[:-1])[: len(order)]]
    last = np.append(memory[faster[1:]] > memory[faster[:-1]], True)  # of those of one size
    found: Integers = faster[last[: len(faster)]]
    return found
