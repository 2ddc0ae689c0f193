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
from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from .frontier import NOTHING, Frontier, Known, Prune, joined, of_one, promising, thinned
from .linear import ROUNDING, Parts, least_rate, least_seconds, limits_of
from .problem import Problem, StagePlan

Ranges = Sequence[tuple[int, int]]
"""First and end of each chunk of a stage."""
Items = Sequence[tuple[int, int, int, int]]
"""Chunk, sort, micro-batches alive, and layers."""


class Knapsack:
    """Best choices of the stages of a problem; remembers what it has computed."""

    def __init__(self, problem: Problem, known: Known | None = None) -> None:
        """`known` are frontiers of problems that may have the same choices."""
        self.problem = problem
        self.choices = [
            tuple((c.backward, c.held, c.kept, c.work) for c in sort.choices)
            for sort in problem.sorts
        ]
        """Choices of each sort, without their names."""
        self.same = [self.choices.index(own) for own in self.choices]
        """First sort with the same choices, by sort: calls of different shared blocks are alike."""
        self._stages: dict[tuple[object, ...], StagePlan | None] = {}
        self._known = {} if known is None else known
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
            left[chunk, sort] = chosen[start:end]
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

    def _limits(self, items: Items, room: float, least: float) -> list[tuple[float, float]]:
        """Return bounds of the time, least first, with the limit of the work that each is for."""
        parts = parts_of(items)
        limits = limits_of(self.problem, {sort for sort, *_ in parts}, least)
        return sorted(
            (least_seconds(self.problem, parts, room - work, work), work) for work in limits
        )

    def _fastest(
        self, items: Items, room: float, least_work: float
    ) -> tuple[float, float, list[int]] | None:
        """Return the fastest choice of every layer, if all of them fit."""
        time = memory = 0.0
        work = least_work
        chosen: list[int] = []
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
        return time, memory + work, chosen

    def _shortest(
        self, items: Items, room: float, work: float, bound: float
    ) -> tuple[float, float, list[int]] | None:
        """Return the least time within the room, whose bound by linear programming is known."""
        self._thin = False
        first = self._select(items, room, work)
        if first is None or not self._thin or first[0] <= bound * (1 + ROUNDING):
            return first
        parts = parts_of(items)
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
        self, items: Items, room: float, work: float
    ) -> tuple[float, float, list[int]] | None:
        """Return the least time within the room: time, memory, counts of each item in turn."""
        frontiers: list[Frontier] = []
        for _, sort, alive, count in items:
            frontier = self._of_sort(sort, alive, count, work)
            if frontier is None:
                return None
            frontiers.append(frontier)
        if len(items) > 1:
            rate = least_rate(self.problem, parts_of(items), room, work)
            frontiers = promising(frontiers, room, rate * (1 + ROUNDING))
        whole, last = NOTHING, frontiers[-1]
        for frontier in frontiers[:-1]:
            whole = joined(whole, frontier, room)
        # Of the last sort, the fastest selection that fits beside each of the others.
        beside = np.searchsorted(last.memory, room - whole.memory, side="right") - 1
        [fits] = np.nonzero(beside >= 0)
        if not len(fits):
            return None
        times = whole.time[fits] + last.time[beside[fits]]
        one = fits[times.argmin()]
        other = beside[one]
        counts = whole.counts(one) + last.counts(other)
        return float(times.min()), float(whole.memory[one] + last.memory[other]), counts

    def _of_sort(self, sort: int, alive: int, count: int, work: float) -> Frontier | None:
        """Return the frontier of so many layers of a sort; None if no choice is within `work`."""
        limit = bisect_right(self.problem.sorts[sort].works, work)  # others allow the same choices
        key = self.choices[sort], limit, alive, count
        known = self._known if self._prune is None else self._prune.known
        if key not in known:
            known[key] = self._multiply(sort, alive, count, work)
        found = known[key]
        self._thin |= found is not None and not found.whole
        return found

    def _multiply(self, sort: int, alive: int, count: int, work: float) -> Frontier | None:
        if count == 1:
            return of_one(self.problem.sorts[sort].choices, alive, work)
        half = self._of_sort(sort, alive, count // 2, work)
        rest = self._of_sort(sort, alive, count - count // 2, work)
        if half is None or rest is None:
            return None
        if self._prune is None:
            return thinned(joined(half, rest, np.inf, alike=True))
        return self._prune.joined(half, rest, sort, alive)


def parts_of(items: Items) -> Parts:
    return [(sort, count, alive) for _, sort, alive, count in items]


def _take(numbers: list[int], count: int) -> tuple[int, ...]:
    """Take so many layers from those of each choice."""
    found = []
    for place, n in enumerate(numbers):
        taken = min(n, count)
        numbers[place] -= taken
        count -= taken
        found.append(taken)
    return tuple(found)
