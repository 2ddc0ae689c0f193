"""The plan of a layout that fits, or the proof that none does, by the timelines of its stages.

What layers keep and work with depends on their recompute rules. `least_of` makes the passes of a
layer that keeps and works with the least of several rules at every moment: no rule is below them.
A stage that exceeds the budget with such layers has no plan. One that does not exceed it is tried
with real rules; where none of them fits, the rules of the layer at its highest moment are tried
apart (branch and bound).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from ....models.accounting.pieces import ModelPasses, Passes, PassSegment, find_peak
from ....models.accounting.step import Timeline
from ....models.config.options.recompute import Rule
from ....trainer.layout.cuts import Cuts
from ...grid.grid import Grid
from ...prices.layers import Costs
from ...traces.work import RULES
from .floors import Floors, Kept, Ranges, farthest, interleaved_cuts

BRANCHES, COUNTED = 60, 200
"""Most timelines that are counted before a stage, or a layout, is left undecided; of a model of few
layers, as many as have SMALL layers together."""
SMALL = 3_000
BEGINNINGS = 3_000
"""Most beginnings of divisions of an interleaved schedule that are tried."""
Alike = tuple[int, tuple[tuple[tuple[int, ...], bool], ...]]
"""A stage, by the sorts of the layers of its chunks: where the layers stand decides nothing else
than whether a shared module is called later."""


class Undecided(Exception):
    """Neither a plan nor the proof that there is none was found within the limits."""


@dataclass(frozen=True)
class LeastPlan:
    """A division with rules that fits."""

    cuts: Cuts
    rules: tuple[Rule, ...]


def least_of(every: Sequence[Passes]) -> Passes:
    """Return passes that are at no moment above any of these: of one layer with several rules."""
    kept = min(passes.activations for passes in every)
    forward = PassSegment(min(find_peak(passes.forward) for passes in every), kept)
    levels = [passes.activations for passes in every]
    now, backward = kept, []
    for pieces in zip(*(passes.backward for passes in every), strict=True):
        one = pieces[0]
        assert all((p.gradient, p.size) == (one.gradient, one.size) for p in pieces), "one order"
        most = min(level + piece.high for level, piece in zip(levels, pieces, strict=True))
        levels = [level + piece.change for level, piece in zip(levels, pieces, strict=True)]
        backward.append(PassSegment(most - now, min(levels) - now, one.gradient, one.size))
        now = min(levels)
    return Passes((forward,), tuple(backward))


class LeastMemory:
    """Timelines of a layout with the least of its recompute rules."""

    def __init__(self, costs: Costs, grid: Grid, *, rows: int | None = None) -> None:
        """With `rows`, a micro-batch has so many, and the numbers bound those of more rows."""
        self.costs = costs
        self.grid = grid
        if rows is not None:
            self.grid = replace(grid, shape=replace(grid.shape, rows=rows))
        self.split, self.ep = self.grid.shape.split, grid.layout.ep
        self.layers = len(costs.trace.layers)
        self._stages: dict[Alike, Sequence[int] | None] = {}
        """Rules with which a stage fits, layer by layer."""
        self._least: dict[tuple[int, frozenset[int]], Passes] = {}

    @cached_property
    def by_rule(self) -> dict[Rule, ModelPasses]:
        return whole_by_rule(self.costs, self.grid)

    @cached_property
    def kept(self) -> Kept:
        """Least bytes that parts keep."""
        found = self.by_rule.values()
        one = self.by_rule[RULES[0]]
        places = self.costs.memory.footprints.places
        least = [least_of([passes.layers[place] for passes in found]) for place in places]
        return Kept(
            [passes.activations for passes in least],
            [find_peak(passes.backward) for passes in least],
            one.first.activations,
            one.last.activations,
            find_peak(one.last.backward),
        )

    @cached_property
    def floors(self) -> Floors:
        return floors_of(self.costs, self.grid, self.kept)

    def passes(self, allowed: Sequence[frozenset[int]]) -> ModelPasses:
        """Return the passes of a model whose layers keep the least of the allowed rules."""
        every = [self.by_rule[rule] for rule in RULES]
        layers = []
        for number, own in enumerate(allowed):
            key = number, own
            if key not in self._least:
                self._least[key] = least_of([every[rule].layers[number] for rule in sorted(own)])
            layers.append(self._least[key])
        return replace(every[0], layers=layers)

    def stage(self, cuts: Cuts, stage: int, allowed: Sequence[frozenset[int]]) -> Timeline:
        memory = self.costs.memory
        shards = memory.shards(self.split.tp, self.ep)
        passes = self.passes(allowed)
        return memory.stage_timeline(self.grid, self.grid.engine, passes, shards, cuts, stage)

    def bounded(self, cuts: Cuts, stage: int, budget: float) -> bool:
        """Return True if a stage with the least of all rules is within the budget."""
        everything = [frozenset(range(len(RULES)))] * self.layers
        return self.stage(cuts, stage, everything).highest <= budget

    def rules(self, cuts: Cuts, stage: int, ranges: Ranges, budget: float) -> Sequence[int] | None:
        """Return rules of a stage's layers with which it fits; None if none do. The budget is the
        same in all calls."""
        sorts = self.costs.trace.layers
        called = self.floors.called
        key = stage, tuple((sorts[a:b], any(called[a:])) for a, b in ranges)
        if key not in self._stages:
            if len(self._stages) >= COUNTED:
                raise Undecided
            self._stages[key] = self._rules(cuts, stage, ranges, budget)
        return self._stages[key]

    def _rules(self, cuts: Cuts, stage: int, ranges: Ranges, budget: float) -> Sequence[int] | None:
        own = [layer for first, end in ranges for layer in range(first, end)]
        tried = 0
        todo = [[frozenset(range(len(RULES)))] * self.layers]
        while todo:
            allowed = todo.pop()
            tried += 1
            if self.stage(cuts, stage, allowed).highest > budget:
                continue
            best: tuple[int, Timeline, Sequence[frozenset[int]]] | None = None
            for rule in range(len(RULES)):
                fixed = [each & {rule} or frozenset({min(each)}) for each in allowed]
                timeline = self.stage(cuts, stage, fixed)
                tried += 1
                if timeline.highest <= budget:
                    return [min(fixed[layer]) for layer in own]
                if best is None or timeline.highest < best[0]:
                    best = timeline.highest, timeline, fixed
            if tried > max(BRANCHES, SMALL // self.layers):
                raise Undecided
            assert best is not None
            layer = self._branch(best[1], own, allowed)
            used = best[2][layer]
            for part in (allowed[layer] - used, used):
                todo.append([*allowed[:layer], part, *allowed[layer + 1 :]])
        return None

    def _branch(
        self, timeline: Timeline, own: Sequence[int], allowed: Sequence[frozenset[int]]
    ) -> int:
        """Return a layer with several rules: that of the highest moment, or the last one."""
        open_ = [layer for layer in own if len(allowed[layer]) > 1]
        peak = timeline.peak.layer
        if peak in open_:
            return peak
        return open_[-1]


def whole_by_rule(costs: Costs, grid: Grid) -> dict[Rule, ModelPasses]:
    """Return the passes of all layers under each rule, in this layout."""
    own = grid.shape.split, grid.layout.ep, grid.engine.linear
    traces = costs.memory.footprints.traces(*own)
    return {rule: traces.whole([rule] * len(costs.trace.layers)) for rule in RULES}


def floors_of(costs: Costs, grid: Grid, kept: Kept | None = None) -> Floors:
    layout = grid.layout
    lasting = costs.memory.lasting(
        grid.engine, layout.pp, grid.shape.dp, layout.cp, layout.tp, layout.ep
    )
    calls = [layer.layer.get("shared") for layer in costs.sorts]
    return Floors(grid, costs.trace.layers, calls, lasting, kept)


def alone(stage: int, first: int, end: int, stages: int, layers: int) -> Cuts:
    """Return cuts that give a stage these layers, one chunk for each stage."""
    before = (*range(1, stage), first) if stage else ()
    after = (end, *range(layers - (stages - 2 - stage), layers)) if stage < stages - 1 else ()
    return (*before, *after)


def may_fit(least: LeastMemory, budget: float) -> bool:
    """Return False if every division exceeds the budget with the least of all rules."""
    layout = least.grid.layout
    if not least.floors.may_fit(budget):
        return False
    if layout.chunks > 1:
        return True

    def fits(stage: int, first: int, end: int) -> bool:
        cuts = alone(stage, first, end, layout.pp, least.layers)
        return least.bounded(cuts, stage, budget)

    return farthest(layout.pp, least.layers, fits) is not None


def least_plan(least: LeastMemory, budget: float) -> LeastPlan | None:
    """Return a plan of the layout that fits; None if none does. Raise Undecided at the limits."""
    layout, layers = least.grid.layout, least.layers
    if layout.chunks > 1:
        return _interleaved_plan(least, budget)

    def fits(stage: int, first: int, end: int) -> bool:
        cuts = alone(stage, first, end, layout.pp, layers)
        return least.rules(cuts, stage, [(first, end)], budget) is not None

    cuts = farthest(layout.pp, layers, fits)
    return None if cuts is None else _with_rules(least, cuts, budget)


def _interleaved_plan(least: LeastMemory, budget: float) -> LeastPlan | None:
    for cuts in interleaved_cuts(least.floors, budget, BEGINNINGS):
        if cuts is None:
            raise Undecided
        if (found := _with_rules(least, cuts, budget)) is not None:
            return found
    return None


def _with_rules(least: LeastMemory, cuts: Cuts, budget: float) -> LeastPlan | None:
    """Return the division with rules with which all of its stages fit; None without them."""
    stages, ends = least.grid.layout.pp, (0, *cuts, least.layers)
    ranges = list(pairwise(ends))
    rules: list[Rule] = [RULES[0]] * least.layers
    for stage in range(stages):
        found = least.rules(cuts, stage, ranges[stage::stages], budget)
        if found is None:
            return None
        numbers = iter(found)
        for first, end in ranges[stage::stages]:
            rules[first:end] = [RULES[next(numbers)] for _ in range(first, end)]
    return LeastPlan(cuts, tuple(rules))


@dataclass(frozen=True)
class Proof:
    """Layouts that may fit, of those that were asked for; the others are proven not to."""

    plans: Sequence[tuple[Grid, LeastPlan]]
    undecided: Sequence[Grid]


def prove(costs: Costs, grids: Iterable[Grid], budget: float) -> Proof:
    """Decide which of these layouts fit.

    Layouts that differ in the rows of a micro-batch alone are bounded together first: by the
    fewest rows and the fewest micro-batches of any of them.
    """
    families: dict[tuple[object, ...], list[Grid]] = {}
    for grid in grids:
        if floors_of(costs, grid).may_fit(budget):
            families.setdefault((id(grid.engine), grid.layout, grid.shape.dp), []).append(grid)
    plans: list[tuple[Grid, LeastPlan]] = []
    undecided: list[Grid] = []
    for alike in families.values():
        rows = min(grid.shape.rows for grid in alike)
        fewest = min(alike, key=lambda grid: grid.shape.micro_batches)
        if not may_fit(LeastMemory(costs, fewest, rows=rows), budget):
            continue
        for grid in alike:
            least = LeastMemory(costs, grid)
            try:
                found = least_plan(least, budget) if may_fit(least, budget) else None
            except Undecided:
                undecided.append(grid)
                continue
            if found is not None:
                plans.append((grid, found))
    return Proof(plans, undecided)
