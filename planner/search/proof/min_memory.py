"""Find a plan that fits in a layout, or prove that none does, by the stages' timelines.

Activations and workspaces depend on recompute rules. `min_passes` returns a layer's lower envelope
over several rules. A stage that exceeds the budget with such layers has no plan.
Otherwise it is tried with real rules; if none fits, branch and bound splits the rules of the layer
at the peak.
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
from .floors import Floors, MinActivations, Ranges, cut_greedily, interleaved_cuts

MAX_TIMELINES = 60
"""Maximum number of timelines counted before a stage stays undecided. If the model has few layers,
the maximum is `MAX_TIMELINE_LAYERS` layers in all timelines."""
MAX_TIMELINE_LAYERS = 3_000
MAX_STAGES = 200
"""Maximum number of different stages searched before a layout stays undecided."""
MAX_PARTIAL_CUTS = 3_000
"""Maximum number of partial interleaved divisions tried."""
StageKey = tuple[int, tuple[tuple[tuple[int, ...], bool], ...]]
"""A stage, and by chunk its layers' kinds, and True if any layer from its first on calls a shared
module: the layers' position matters for nothing else."""


class Undecided(Exception):
    """The limits ended the search before a plan or a proof."""


@dataclass(frozen=True)
class FittingPlan:
    """A division with recompute rules that fits."""

    cuts: Cuts
    rules: tuple[Rule, ...]


def min_passes(rule_passes: Sequence[Passes]) -> Passes:
    """Return a layer's lower envelope over several rules: passes that never need more memory than
    any of these."""
    activations = min(passes.activations for passes in rule_passes)
    forward = PassSegment(min(find_peak(passes.forward) for passes in rule_passes), activations)
    levels = [passes.activations for passes in rule_passes]
    level_before, backward = activations, []
    for segments in zip(*(passes.backward for passes in rule_passes), strict=True):
        gradient, size = segments[0].gradient, segments[0].size
        assert all((s.gradient, s.size) == (gradient, size) for s in segments), "one order"
        peak = min(level + segment.high for level, segment in zip(levels, segments, strict=True))
        levels = [level + segment.change for level, segment in zip(levels, segments, strict=True)]
        level = min(levels)
        backward.append(PassSegment(peak - level_before, level - level_before, gradient, size))
        level_before = level
    return Passes((forward,), tuple(backward))


class MinMemory:
    """A layout's timelines with the minimum over recompute rules."""

    def __init__(self, costs: Costs, grid: Grid, *, rows: int | None = None) -> None:
        """`rows` replaces the rows per micro-batch, and gives lower bounds for more rows."""
        self.costs = costs
        self.grid = grid
        if rows is not None:
            self.grid = replace(grid, shape=replace(grid.shape, rows=rows))
        self.split, self.ep = self.grid.shape.split, grid.layout.ep
        self.layers = len(costs.trace.layers)
        self._stages: dict[StageKey, Sequence[int] | None] = {}
        """Rules that make a stage fit, by layer."""
        self._min_passes: dict[tuple[int, frozenset[int]], Passes] = {}

    @cached_property
    def passes_by_rule(self) -> dict[Rule, ModelPasses]:
        return trace_by_rule(self.costs, self.grid)

    @cached_property
    def activations(self) -> MinActivations:
        """Lower bounds on activations and workspaces, over all rules."""
        models = self.passes_by_rule.values()
        ends = self.passes_by_rule[RULES[0]]  # rules change layers alone
        kind_layers = self.costs.memory.footprints.kind_layers
        layers = [min_passes([passes.layers[layer] for passes in models]) for layer in kind_layers]
        return MinActivations(
            [layer.activations for layer in layers],
            [find_peak(layer.backward) for layer in layers],
            ends.first.activations,
            ends.last.activations,
            find_peak(ends.last.backward),
        )

    @cached_property
    def floors(self) -> Floors:
        return build_floors(self.costs, self.grid, self.activations)

    def passes(self, allowed: Sequence[frozenset[int]]) -> ModelPasses:
        """Return a model whose layers use the minimum over their allowed rules."""
        models = [self.passes_by_rule[rule] for rule in RULES]
        layers = []
        for layer, rules in enumerate(allowed):
            key = layer, rules
            if key not in self._min_passes:
                layer_passes = [models[rule].layers[layer] for rule in sorted(rules)]
                self._min_passes[key] = min_passes(layer_passes)
            layers.append(self._min_passes[key])
        return replace(models[0], layers=layers)

    def stage(self, cuts: Cuts, stage: int, allowed: Sequence[frozenset[int]]) -> Timeline:
        memory = self.costs.memory
        shards = memory.shards(self.split.tp, self.ep)
        passes = self.passes(allowed)
        return memory.stage_timeline(self.grid, self.grid.engine, passes, shards, cuts, stage)

    def may_fit(self, cuts: Cuts, stage: int, budget: float) -> bool:
        """Return True if a stage with the minimum over all rules is within the budget."""
        all_rules = [frozenset(range(len(RULES)))] * self.layers
        return self.stage(cuts, stage, all_rules).highest <= budget

    def rules(self, cuts: Cuts, stage: int, ranges: Ranges, budget: float) -> Sequence[int] | None:
        """Return indices into RULES for a stage's layers so that it fits; None if it cannot. The
        budget is the same in all calls."""
        kinds = self.costs.trace.layers
        modules = self.floors.layer_modules
        key = stage, tuple((kinds[first:end], any(modules[first:])) for first, end in ranges)
        if key not in self._stages:
            if len(self._stages) >= MAX_STAGES:
                raise Undecided
            self._stages[key] = self._search_rules(cuts, stage, ranges, budget)
        return self._stages[key]

    def _search_rules(
        self, cuts: Cuts, stage: int, ranges: Ranges, budget: float
    ) -> Sequence[int] | None:
        """Branch and bound over sets with allowed rules, a set per layer."""
        stage_layers = [layer for first, end in ranges for layer in range(first, end)]
        num_timelines = 0
        stack = [[frozenset(range(len(RULES)))] * self.layers]
        while stack:
            allowed = stack.pop()
            num_timelines += 1
            if self.stage(cuts, stage, allowed).highest > budget:
                continue
            best: tuple[int, Timeline, Sequence[frozenset[int]]] | None = None
            for rule in range(len(RULES)):
                fixed = [rules & {rule} or frozenset({min(rules)}) for rules in allowed]
                timeline = self.stage(cuts, stage, fixed)
                num_timelines += 1
                if timeline.highest <= budget:
                    return [min(fixed[layer]) for layer in stage_layers]
                if best is None or timeline.highest < best[0]:
                    best = timeline.highest, timeline, fixed
            if num_timelines > max(MAX_TIMELINES, MAX_TIMELINE_LAYERS // self.layers):
                raise Undecided
            assert best is not None
            layer = self._choose_branch(best[1], stage_layers, allowed)
            used = best[2][layer]
            for rules in (allowed[layer] - used, used):
                stack.append([*allowed[:layer], rules, *allowed[layer + 1 :]])
        return None

    def _choose_branch(
        self, timeline: Timeline, layers: Sequence[int], allowed: Sequence[frozenset[int]]
    ) -> int:
        """Return an undecided layer: the layer at the peak, or else the last."""
        undecided = [layer for layer in layers if len(allowed[layer]) > 1]
        peak = timeline.peak.layer
        return peak if peak in undecided else undecided[-1]


def trace_by_rule(costs: Costs, grid: Grid) -> dict[Rule, ModelPasses]:
    """Return all layers' passes under every rule, in this layout."""
    split, ep, linear = grid.shape.split, grid.layout.ep, grid.engine.linear
    traces = costs.memory.footprints.traces(split, ep, linear)
    return {rule: traces.trace_model([rule] * len(costs.trace.layers)) for rule in RULES}


def build_floors(costs: Costs, grid: Grid, activations: MinActivations | None = None) -> Floors:
    """Return a layout's memory floors; without `activations`, they count its state alone."""
    parts = costs.memory.sample_parts(grid.engine, grid.layout.pp, grid.degrees, edges=False)
    kind_modules = [layer.operators.get("shared") for layer in costs.kinds]
    return Floors(grid, costs.trace.layers, kind_modules, parts, activations)


def isolate_stage(stage: int, first: int, end: int, stages: int, layers: int) -> Cuts:
    """Return cuts that give a stage exactly the layers [first, end), with a chunk per stage."""
    before = (*range(1, stage), first) if stage else ()
    after = (end, *range(layers - (stages - 2 - stage), layers)) if stage < stages - 1 else ()
    return (*before, *after)


def may_fit(memory: MinMemory, budget: float) -> bool:
    """Return False if every division exceeds the budget with the minimum over all rules."""
    layout = memory.grid.layout
    if not memory.floors.may_fit(budget):
        return False
    if layout.chunks > 1:
        return True

    def fits(stage: int, first: int, end: int) -> bool:
        cuts = isolate_stage(stage, first, end, layout.pp, memory.layers)
        return memory.may_fit(cuts, stage, budget)

    return cut_greedily(layout.pp, memory.layers, fits) is not None


def find_fitting_plan(memory: MinMemory, budget: float) -> FittingPlan | None:
    """Return a plan that fits; None if none does. Raise Undecided at the limits."""
    layout, layers = memory.grid.layout, memory.layers
    if layout.chunks > 1:
        return _find_interleaved_plan(memory, budget)

    def fits(stage: int, first: int, end: int) -> bool:
        cuts = isolate_stage(stage, first, end, layout.pp, layers)
        return memory.rules(cuts, stage, [(first, end)], budget) is not None

    cuts = cut_greedily(layout.pp, layers, fits)
    return None if cuts is None else _assign_rules(memory, cuts, budget)


def _find_interleaved_plan(memory: MinMemory, budget: float) -> FittingPlan | None:
    for cuts in interleaved_cuts(memory.floors, budget, MAX_PARTIAL_CUTS):
        if cuts is None:
            raise Undecided
        if (plan := _assign_rules(memory, cuts, budget)) is not None:
            return plan
    return None


def _assign_rules(memory: MinMemory, cuts: Cuts, budget: float) -> FittingPlan | None:
    """Return the division with rules that make every stage fit; None if a stage cannot."""
    stages, ends = memory.grid.layout.pp, (0, *cuts, memory.layers)
    ranges = list(pairwise(ends))
    rules: list[Rule] = [RULES[0]] * memory.layers
    for stage in range(stages):
        stage_rules = memory.rules(cuts, stage, ranges[stage::stages], budget)
        if stage_rules is None:
            return None
        indices = iter(stage_rules)
        for first, end in ranges[stage::stages]:
            rules[first:end] = [RULES[next(indices)] for _ in range(first, end)]
    return FittingPlan(cuts, tuple(rules))


@dataclass(frozen=True)
class Proof:
    """Plans that fit, and undecided layouts; every layout in neither is proven not to fit."""

    plans: Sequence[tuple[Grid, FittingPlan]]
    undecided: Sequence[Grid]


def prove(costs: Costs, grids: Iterable[Grid], budget: float) -> Proof:
    """Decide which layouts fit.

    Layouts that differ only in rows per micro-batch are first bounded together, by the fewest rows
    and the fewest micro-batches among them.
    """
    families: dict[tuple[object, ...], list[Grid]] = {}
    for grid in grids:
        if build_floors(costs, grid).may_fit(budget):
            families.setdefault((id(grid.engine), grid.layout, grid.shape.dp), []).append(grid)
    plans: list[tuple[Grid, FittingPlan]] = []
    undecided: list[Grid] = []
    for family in families.values():
        rows = min(grid.shape.rows for grid in family)
        fewest = min(family, key=lambda grid: grid.shape.micro_batches)
        if not may_fit(MinMemory(costs, fewest, rows=rows), budget):
            continue
        for grid in family:
            memory = MinMemory(costs, grid)
            try:
                plan = find_fitting_plan(memory, budget) if may_fit(memory, budget) else None
            except Undecided:
                undecided.append(grid)
                continue
            if plan is not None:
                plans.append((grid, plan))
    return Proof(plans, undecided)
