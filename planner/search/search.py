"""Best-first search over all layouts, with a division of the best ones.

    shape     pp, cp, tp, ep, rows       bounded by the passes of all layers, shared evenly
    grid      + engine, schedule         bounded by the fastest choices, within the memory
                                         (bounds.py), and by the program over divisions (solve.py)
    plan      + cuts, choices of layers  priced by events

A heap holds nodes, which yield rising bounds. The search pops the node with the lowest bound and
pushes it again with its next one, unless that exceeds the prices of all questions that the node may
answer: the best plans, the best plan of each idea, and with each kind of parallelism (ideas.py).
Where the memory of a layout costs time, the layout with its optimizer in host memory is another
node, pushed when the heap is empty: by then the best plans have low prices.

Bytes beyond the budget cost more seconds than any step. So layouts that fit come first; where none
does, those with the smallest excess follow, and the search ends with the nearest.
"""

from __future__ import annotations

import gc
import heapq
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

from ...models.accounting.step import Timeline
from ...trainer.engines.config import EngineConfig
from ...trainer.layout.schedules import SCHEDULES
from ..division.bounds import quick_bound
from ..division.choices import EXCESSIVE, PENALTY
from ..division.fit import fit
from ..division.problem import Problem, Solution
from ..division.program import Start
from ..division.solve import Divisions
from ..grid.grid import Grid, LayoutShape, enumerate_shapes, find_refusal, list_shards
from ..grid.settings import Settings, has_settings, may_match_layout, may_match_shape
from ..prices.layers import Costs
from ..prices.missing import refuse_offload
from .exchange import exchange_choices
from .ideas import Idea, name_idea, name_shape
from .outcome import Candidate, SearchOutcome

BEST = 10
"""Plans that a search returns."""
FACTOR = 2.0
"""Ideas that take more than this multiple of the best step are not searched."""
NEAR = 0.995
"""Part of a price below which a plan replaces it. The best plan is the best; the prices of the
plans after it, and of other ideas, may be so near to the best of their kind."""
NEAR_IDEA = 0.98
"""The same for an idea that has no plan yet: it would replace the last that is shown."""
NEAR_KIND = 0.95
"""The same for the best plan with a kind of parallelism, which says why the best do without it."""
NEAR_OFFLOAD = 0.95
"""The same for a layout with its optimizer in host memory, beside the layout without and beside
the best plan: it answers no other question."""
FARTHEST = 8.0
"""Plans that take more than this multiple of the best step are no candidates, however few."""
MARGIN = 1e-9
"""Relative difference below which two times are equal: the simpler layout is then better."""
MISFITS = 12
"""Layouts with excessive bytes that are divided before the search ends without a plan."""


@contextmanager
def _pause_garbage_collection() -> Iterator[None]:
    """Disable cyclic garbage collection. A search allocates millions of objects without cycles,
    and each collection would visit all live ones."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_pause_garbage_collection()
def search(
    costs: Costs,
    num_gpus: int,
    budget: float,
    *,
    settings: Settings | None = None,
    num_best: int = BEST,
    num_ideas: int = 0,
    simulate: bool = False,
) -> SearchOutcome:
    """Return the best plans within `budget` bytes per device; with `num_ideas`, also the best plans
    of different ideas."""
    return LayoutSearch(costs, num_gpus, budget, settings, num_best, num_ideas, simulate).run()


class LayoutSearch:
    """State of a search: a heap of nodes, and the best candidates so far."""

    def __init__(
        self,
        costs: Costs,
        num_gpus: int,
        budget: float,
        settings: Settings | None,
        num_best: int,
        num_ideas: int,
        simulate: bool,
    ) -> None:
        self.costs, self.num_gpus, self.budget = costs, num_gpus, budget
        self.settings, self.simulate = settings, simulate
        self.num_best, self.num_ideas = num_best, num_ideas
        self.may_offload = refuse_offload(costs) is None
        self.outcome = SearchOutcome()
        self._heap: list[tuple[float, int, Sequence[Idea], Iterator[float]]] = []
        """Bound, order of arrival, the ideas that the node may have, and its further bounds."""
        self._arrivals = count()
        self._idea_prices: dict[Idea, float] = {}
        self._kind_prices: dict[str, float] = {}
        """Price of the best candidate with a kind of parallelism."""
        self._last_idea_price = math.inf
        """Price of the last idea among those that are shown; infinite while there are fewer."""
        self._state_bounds: dict[tuple[object, ...], float] = {}
        self._num_misfits = 0
        self._limit = math.inf
        """Price that all further plans must beat."""
        self._offloaded: list[tuple[Grid, float, float]] = []
        """Layouts that offload, their bounds without memory, and the prices that they must beat."""
        self._offloading: dict[int, EngineConfig | None] = {}
        """Engines that offload, by the identity of those that do not: costs are cached by it."""
        self._problems: dict[tuple[int, int, bool], Problem] = {}

    def run(self) -> SearchOutcome:
        """Refine nodes until none has a bound below the worst of the best candidates."""
        self._push_shapes()
        self._refine_nodes()
        if self.outcome.candidates:
            self._limit = NEAR_OFFLOAD * self.outcome.candidates[0].solution.price
        for grid, bound, price in self._offloaded:
            self._push_grid(grid, bound, {}, price)
        self._num_misfits = 0
        self._refine_nodes()
        outcome = self.outcome
        improved = {id(c): exchange_choices(self.costs, c) for c in outcome.all_candidates}
        outcome.candidates = sorted((improved[id(c)] for c in outcome.candidates), key=_rank)
        outcome.by_idea = {idea: improved[id(c)] for idea, c in outcome.by_idea.items()}
        return outcome

    def _refine_nodes(self) -> None:
        while self._heap:
            bound, _, ideas, bounds = heapq.heappop(self._heap)
            if bound < self._ceiling(ideas) and (bound := next(bounds, math.inf)) < math.inf:
                self._push(bound, ideas, bounds)

    def _ceiling(self, ideas: Sequence[Idea]) -> float:
        """Return the price above which plans of these ideas answer no question: that of the best
        candidate, or one that is NEAR the last of the best or the best of the idea."""
        candidates = self.outcome.candidates
        if not candidates:
            return math.inf
        if len(candidates) < self.num_best:
            return min(FARTHEST * candidates[0].solution.price, self._limit)
        best, last = candidates[0].solution.price, candidates[-1].solution.price
        ceiling = max(best, NEAR * last)
        if not self.num_ideas or self._limit < math.inf:
            return min(ceiling, self._limit)
        return max(ceiling, min(FACTOR * best, max(map(self._idea_ceiling, ideas))))

    def _idea_ceiling(self, idea: Idea) -> float:
        """Return the price of the candidates that a plan of the idea could replace: the last idea
        that is shown, and the best with a kind of parallelism; at most that of the idea's best."""
        kinds = [NEAR_KIND * self._kind_prices.get(kind, math.inf) for kind in idea.kinds]
        replaceable = max(NEAR_IDEA * self._last_idea_price, *kinds, 0.0)
        return min(NEAR * self._idea_prices.get(idea, math.inf), replaceable)

    def _push(self, bound: float, ideas: Sequence[Idea], bounds: Iterator[float]) -> None:
        if bound < self._ceiling(ideas):
            heapq.heappush(self._heap, (bound, next(self._arrivals), ideas, bounds))

    def _push_shapes(self) -> None:
        costs = self.costs
        per_node = costs.machine.per_node
        for shape, layout, refusals in enumerate_shapes(
            costs.model, self.num_gpus, per_node, costs.phase
        ):
            if may_match_layout(layout, self.settings):  # other layouts' refusals are not shown
                self.outcome.refused.update(refusals)
            if shape is not None and may_match_shape(shape, self.settings):
                self.outcome.shapes += 1
                bound = bound_shape(costs, shape, self.simulate)
                ideas = [name_shape(shape, shard) for shard in list_shards(shape, per_node)]
                self.outcome.kinds.update(kind for idea in ideas for kind in idea.kinds)
                self._push(bound, ideas, self._expand_shape(shape, bound))

    def _expand_shape(self, shape: LayoutShape, bound: float) -> Iterator[float]:
        """Push the engines and schedules of a shape; it has no further bound."""
        fastest: dict[int, Problem] = {}  # schedules differ in nothing else
        offload = self.may_offload and "offload" in (self.settings or ())
        for grid in self.costs.grids(shape, self.num_gpus, offload=offload):
            if self.settings or not grid.engine.is_special_case:
                self._push_grid(grid, bound, fastest)
        yield from ()

    def _push_grid(
        self, grid: Grid, bound: float, fastest: dict[int, Problem], ceiling: float = math.inf
    ) -> None:
        """Push a layout that has the settings, bounded without the memory, if it is below the
        ceiling."""
        ideas = [name_idea(grid)]
        ceiling = min(ceiling, self._ceiling(ideas))
        if not has_settings(grid.settings(), self.settings or {}):
            return
        self.outcome.grids += 1
        key = id(grid.engine)
        if bound < ceiling:
            if key not in fastest:
                fastest[key] = self.costs.fastest_problem(grid, simulate=self.simulate)
            bound = quick_bound(apply_schedule(fastest[key], grid))
        if bound < ceiling:
            self._push(bound, ideas, self._refine(grid, bound))

    def _refine(self, grid: Grid, bound: float) -> Iterator[float]:
        """Yield rising bounds on a layout's price: by its state, its bytes, and the start of its
        division. Then add its best plan. Where memory costs time, note the layout with its
        optimizer in host memory, too."""
        excess = self._bound_state(grid) / self.budget - 1
        offloaded = excess > 0 and self._note_offloaded(grid, bound, math.inf)
        if excess > 0:
            self.outcome.states += 1
            yield max(EXCESSIVE, PENALTY * excess)
        bytes_bound = quick_bound(self._problem(grid))
        offloaded = offloaded or self._note_offloaded(grid, bound, bytes_bound)
        if bytes_bound > bound * (1 + MARGIN):
            yield bytes_bound
        divisions = Divisions(self._problem(grid))
        start = divisions.find_start()
        slow_down = start.estimate / divisions.estimate_fastest(start.cuts)
        del divisions  # the node may wait for long
        offloaded = offloaded or self._note_offloaded(grid, bound, bound * slow_down)
        yield start.estimate
        if not self._solve(grid, start) and not offloaded:
            self._note_offloaded(grid, bound, math.inf)

    def _note_offloaded(self, grid: Grid, bound: float, price: float) -> bool:
        """Note the layout with its optimizer in host memory, and return True, if its bound is below
        the price of the layout without."""
        engine = grid.engine
        if bound >= NEAR_OFFLOAD * price or not self.may_offload or engine.offloads:
            return False
        if id(engine) not in self._offloading:
            self._offloading[id(engine)] = engine.offloading()
        offloading = self._offloading[id(engine)]
        if offloading is None or engine.is_special_case:
            return False
        offloaded = replace(grid, engine=offloading)
        if find_refusal(offloaded, self.num_gpus, self.costs.precision) is not None:
            return False
        self._offloaded.append((offloaded, bound, NEAR_OFFLOAD * price))
        return True

    def _solve(self, grid: Grid, start: Start) -> bool:
        """Add the best plan of a layout, if it beats the ceiling. Return False if none fits."""
        self.outcome.solved += 1
        self._problems.clear()  # solving refines the sizes that problems were built from
        ceiling = self._ceiling([name_idea(grid)])
        result = fit_layout(self.costs, grid, self.budget, ceiling, start, simulate=self.simulate)
        if result is None:
            return True
        candidate, fits = result
        if fits:
            self._add(candidate)
        elif not self.outcome.candidates:
            nearest = self.outcome.nearest
            self.outcome.nearest = min(candidate, nearest or candidate, key=_rank_memory)
            self._num_misfits += start.estimate >= EXCESSIVE
            if self._num_misfits == MISFITS:
                self._heap.clear()
        return fits

    def _add(self, candidate: Candidate) -> None:
        candidates, by_idea = self.outcome.candidates, self.outcome.by_idea
        candidates.append(candidate)
        candidates.sort(key=_rank)
        del candidates[self.num_best :]
        idea = name_idea(candidate.grid)
        by_idea[idea] = min(candidate, by_idea.get(idea, candidate), key=_rank)
        price = self._idea_prices[idea] = by_idea[idea].solution.price
        if len(self._idea_prices) >= self.num_ideas > 0:
            self._last_idea_price = sorted(self._idea_prices.values())[self.num_ideas - 1]
        for kind in idea.kinds:
            self._kind_prices[kind] = min(price, self._kind_prices.get(kind, math.inf))
        for hidden in [idea for idea in by_idea if not self._is_shown(idea)]:
            del by_idea[hidden]  # timelines are large

    def _is_shown(self, idea: Idea) -> bool:
        """Return True if the idea's plan is among those that are shown, or the best of a kind."""
        price = self._idea_prices[idea]
        kinds = (price <= self._kind_prices[kind] for kind in idea.kinds)
        return price <= self._last_idea_price or any(kinds)

    def _problem(self, grid: Grid) -> Problem:
        """Return the problem of a layout whose state fits. The schedules of a shape and engine
        share its costs, unless gradients exist earlier under one of them."""
        key = id(grid.shape), id(grid.engine), grid.has_early_gradients
        if key not in self._problems:
            self._problems[key] = self.costs.problem(grid, self.budget, simulate=self.simulate)
        return apply_schedule(self._problems[key], grid)

    def _bound_state(self, grid: Grid) -> float:
        """Return a lower bound on the fullest stage's bytes: the mean of all state over stages."""
        layout, shape = grid.layout, grid.shape
        degrees = layout.pp, layout.chunks, shape.dp, layout.cp, layout.tp, layout.ep
        key = id(grid.engine), *degrees, shape.micro_batches > 1
        if key not in self._state_bounds:
            self._state_bounds[key] = bound_state(self.costs, grid)
        return 0.0 if self.simulate else self._state_bounds[key]


def bound_state(costs: Costs, grid: Grid) -> float:
    """Return the mean over stages of all state, at the moment in the step when it is largest."""
    parts = costs.memory.sample_parts(grid.engine, grid.layout.pp, grid.degrees, edges=False)
    names = {costs.kinds[kind].operators.get("shared") for kind in costs.trace.layers}
    memories = [
        *(parts.layers[kind] for kind in costs.trace.layers),
        *(parts.modules[name] for name in names if name is not None),
        parts.first,
        parts.last,
    ]
    moments = [0, 1, 2] if grid.shape.micro_batches > 1 else [0, 2]
    return max(sum(memory[n] for memory in memories) for n in moments) / grid.layout.pp


def fit_layout(
    costs: Costs,
    grid: Grid,
    budget: float,
    ceiling: float = math.inf,
    start: Start | None = None,
    *,
    simulate: bool = False,
) -> tuple[Candidate, bool] | None:
    """Return the best plan of a layout below the ceiling, and True if it fits by the timelines of
    its stages."""

    def build_problem() -> Problem:
        return costs.problem(grid, budget, simulate=simulate)

    def measure(solution: Solution) -> Sequence[Timeline] | None:
        layer_plans = [choice.name for choice in solution.choices]
        if costs.refine(grid, layer_plans):  # sizes changed: solve again
            return None
        return costs.timelines(grid, solution.cuts, layer_plans)

    key = grid.layout.pp, grid.layout.tp, grid.layout.schedule, grid.layout.chunks, id(grid.engine)
    result = fit(build_problem, measure, ceiling, costs.excess.get(key, ()), start)
    if result is None:
        return None
    if result.fits:
        costs.excess[key] = result.excess
    return Candidate(grid, build_problem(), result.solution, result.timelines), result.fits


def apply_schedule(problem: Problem, grid: Grid) -> Problem:
    """Return the problem with a grid's schedule and chunks."""
    return replace(problem, schedule=grid.layout.pipeline_schedule, chunks=grid.layout.chunks)


def bound_shape(costs: Costs, shape: LayoutShape, simulate: bool = False) -> float:
    """Return a lower bound on the step: the seconds of all passes, shared evenly by the stages."""
    split = shape.split
    passes, head = costs.passes(split, shape.layout.ep)
    seconds = [cost.forward_seconds + cost.backward_seconds for cost in passes]
    if simulate:  # the tensor ranks of a layer may work as context ranks
        context_passes, _ = costs.passes(split.context_only, shape.layout.ep)
        context_seconds = [cost.forward_seconds + cost.backward_seconds for cost in context_passes]
        seconds = [min(pair) for pair in zip(seconds, context_seconds, strict=True)]
    total = sum(seconds[kind] for kind in costs.trace.layers)
    total = total + head.forward_seconds + head.backward_seconds
    pp = shape.layout.pp
    # Stage s waits for s layers before its first pass, and s layers follow its last one.
    return shape.micro_batches * total / pp + (pp - 1) / 2 * min(seconds)


def _rank_memory(candidate: Candidate) -> int:
    return max(timeline.highest for timeline in candidate.timelines)


def _rank(candidate: Candidate) -> tuple[float, ...]:
    """Order by time; of equal times the layout with smaller degrees is simpler. Times that round to
    the same digits, about MARGIN of the price, are equal."""
    digits = -math.floor(math.log10(candidate.solution.price * MARGIN))
    layout = candidate.grid.layout
    degrees = layout.pp, layout.chunks, layout.cp, layout.tp, layout.ep
    forms = layout.attention == "ring", layout.hyena_li == "a2a", layout.delta == "a2a"
    schedule = [*SCHEDULES].index(layout.schedule)
    return (round(candidate.solution.price, digits), *degrees, *forms, schedule)
