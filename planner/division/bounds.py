"""Lower bounds on price that prune the search.

Linear programming bounds a stage's time (linear.py). The schedule's closed form then bounds the
step: no simulated step is shorter. Bounds never decide which plan is best.

Seconds of passes are per micro-batch, those of steps and updates per step. `hop` is the time of two
messages between neighbouring stages: forward and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from ...trainer.layout.cuts import Cuts
from .linear import ROUNDING, min_backward, min_seconds, min_seconds_over_limits, workspace_limits
from .problem import Flags, Integers, LayerKind, Numbers, Problem

MAX_LIMITS = 12
"""Workspace limits that bounds of ranges try one by one. More are tried in groups, by the choices
of the largest limit within the budget of the smallest."""


def quick_bound(problem: Problem) -> float:
    """Return a lower bound on the step in one pass over the kinds; infinite if nothing fits.

    All stages together have stages × budget bytes, and every stage holds a micro-batch or more.
    """
    stages, in_flight, counts = problem.stages, problem.min_in_flight, problem.layer_counts
    min_workspace = min(choice.workspace for kind in problem.kinds for choice in kind.choices)
    budget = (
        sum(map(problem.stage_budget, range(stages)))
        - stages * min_workspace
        - _fixed_bytes(problem, in_flight)
    )
    groups = [(kind, count, in_flight) for kind, count in enumerate(counts)]
    return _step_bound(problem, min_seconds(problem, groups, budget))


def fastest_bound(problem: Problem) -> float:
    """Return `quick_bound` for unlimited memory, by every layer's fastest choice."""
    layers = zip(problem.layer_counts, problem.kinds, strict=True)
    return _step_bound(problem, sum(count * _fastest_backward(kind) for count, kind in layers))


def _step_bound(problem: Problem, backward: float) -> float:
    """Bound the step from the seconds that all backward passes take per micro-batch."""
    stages, m, counts = problem.stages, problem.micro_batches, problem.layer_counts
    total = backward + _forward_seconds(problem, counts)
    if stages == 1:
        return m * total + _update_seconds(problem, counts)
    if problem.chunks > 1:
        return _interleaved_bound(problem, total)
    # Stage s starts after a pass of the stages before it and then works m·t_s, so the step T is at
    # least t_0 + … + t_(s-1) + m·t_s. T is smallest where this is equal for all stages: then the
    # first s of them take T·(1 - (1 - 1/m)^s) seconds, and all of them `total`.
    return float(total / (1 - (1 - 1 / m) ** stages))


def bound_single_stage(problem: Problem) -> float:
    """Return `quick_bound` for a single stage, with the chosen layers' workspace."""
    counts, fixed = problem.layer_counts, _fixed_bytes(problem, 1)
    groups = [(kind, count, 1) for kind, count in enumerate(counts)]
    limits = workspace_limits(
        problem, set(problem.layers), max(problem.first.workspace, problem.last.workspace)
    )
    backward = min_seconds_over_limits(problem, groups, problem.stage_budget(0) - fixed, limits)
    total = backward + _forward_seconds(problem, counts)
    return problem.micro_batches * total + _update_seconds(problem, counts)


def _fixed_bytes(problem: Problem, in_flight: int) -> float:
    """Return the bytes that both ends and all called modules take."""
    ends = problem.first, problem.last
    size = sum(end.state + in_flight * end.activations for end in ends)
    return size + sum(module.state for module in problem.called_modules)


def _forward_seconds(problem: Problem, counts: Sequence[int]) -> float:
    """Return the seconds of all forward passes, and of the ends' backward passes."""
    ends = problem.first, problem.last
    seconds = sum(end.forward + end.backward for end in ends)
    return seconds + sum(
        count * kind.forward for count, kind in zip(counts, problem.kinds, strict=True)
    )


def _update_seconds(problem: Problem, counts: Sequence[int]) -> float:
    """Return the seconds that a single stage spends outside its passes."""
    seconds = sum(count * kind.update for count, kind in zip(counts, problem.kinds, strict=True))
    seconds += sum(module.update for module in problem.called_modules)
    return seconds + problem.first.update + problem.last.update


def _interleaved_bound(problem: Problem, total: float) -> float:
    """Bound an interleaved step.

    Stage s waits for s forward passes, and s backward passes follow its last one; every chunk has a
    layer. The slowest stage takes at least the mean over stages, and at least the time of the
    fullest stage with the fastest layers.
    """
    stages, m = problem.stages, problem.micro_batches
    fastest_layer = min(kind.forward + _fastest_backward(kind) for kind in problem.kinds)
    mean = m * total / stages + (stages - 1) / 2 * (fastest_layer + 2 * problem.message)
    fullest_stage_layers = -(-len(problem.layers) // stages)
    return max(mean, m * fullest_stage_layers * fastest_layer)


def _fastest_backward(kind: LayerKind) -> float:
    """Return the seconds of a layer's backward pass with its fastest choice."""
    return min(choice.backward for choice in kind.choices)


def _updates_by_counts(problem: Problem, counts: Integers, stage: int) -> Numbers:
    """Return the seconds that a stage spends outside its passes, for every row of `counts`."""
    kind_updates = np.array([kind.update for kind in problem.kinds])
    end_updates = sum(
        end.update for chunk in problem.stage_chunks(stage) for end in problem.end_costs(chunk)
    )
    seconds: Numbers = counts @ kind_updates + end_updates
    for number, module in enumerate(problem.modules):
        seconds = seconds + module.update * _calls_by_counts(problem, counts, number)
    return seconds


def _calls_by_counts(problem: Problem, counts: Integers, module: int) -> Numbers:
    """Return 1.0 for every row of `counts` with a layer that calls the module, else 0.0."""
    users = np.array([kind.module == module for kind in problem.kinds])
    flags: Numbers = (counts[:, users].sum(axis=1) > 0).astype(np.float64)
    return flags


@lru_cache(maxsize=64)
def _count_ranges(
    layers: tuple[int, ...], num_kinds: int, max_length: int
) -> tuple[Integers, Integers, Flags]:
    """Count the layers by kind in all ranges [first, end) of at most `max_length` layers.

    Return the distinct counts [rows, kinds]; the row of every range [first, end]; and a flag for
    ranges [first, end] that are empty or too long. Many ranges share a row: bounds are computed by
    row.
    """
    one_hot = np.eye(num_kinds, dtype=np.int64)[list(layers)]
    prefix = np.concatenate([np.zeros((1, num_kinds), dtype=np.int64), one_hot.cumsum(axis=0)])
    ends = np.arange(len(prefix))
    lengths = ends - ends[:, None]
    invalid = (lengths <= 0) | (lengths > max_length)
    between = np.where(invalid[:, :, None], 0, prefix[None, :, :] - prefix[:, None, :])
    counts, row = np.unique(between.reshape(-1, num_kinds), axis=0, return_inverse=True)
    return counts, row.reshape(invalid.shape), invalid


class Bounds:
    """Lower bounds for all ranges [first, end) of layers as a stage; every stage has one chunk."""

    def __init__(self, problem: Problem) -> None:
        assert problem.chunks == 1
        self.problem = problem
        max_length = len(problem.layers) - problem.stages + 1  # the other stages have one each
        self.counts, self.row, self.invalid = _count_ranges(
            problem.layers, len(problem.kinds), max_length
        )

    def layer_budget(self, stage: int) -> Numbers:
        """[rows]: bytes left for a stage's layers and their largest workspace."""
        problem = self.problem
        [in_flight] = problem.in_flight(stage)
        ends = list(problem.end_costs(stage))
        budget = problem.stage_budget(stage) - np.zeros(len(self.counts))
        budget -= sum(end.state + in_flight * end.activations for end in ends)
        for number, module in enumerate(problem.modules):
            budget = budget - module.state * _calls_by_counts(problem, self.counts, number)
        return budget

    def workspace_limits(self, stage: int) -> list[float]:
        """Return the limits to try for the largest workspace of a stage's layers, ascending."""
        min_workspace = max((end.workspace for end in self.problem.end_costs(stage)), default=0.0)
        return workspace_limits(self.problem, set(self.problem.layers), min_workspace)

    @cached_property
    def times(self) -> Numbers:
        """[stages, first, end]: minimum seconds of both passes; infinite if nothing fits."""
        problem = self.problem
        forward = self.counts @ np.array([kind.forward for kind in problem.kinds])
        stage_times = []
        for stage in range(problem.stages):
            [in_flight] = problem.in_flight(stage)
            backward = self._backward(stage, in_flight)
            end_seconds = sum(end.forward + end.backward for end in problem.end_costs(stage))
            stage_times.append(
                np.where(self.invalid, np.inf, (forward + backward + end_seconds)[self.row])
            )
        return np.array(stage_times)

    def _backward(self, stage: int, in_flight: int) -> Numbers:
        """[rows]: minimum seconds of the layers' backward passes within the budget."""
        problem, budget = self.problem, self.layer_budget(stage)
        limits = self.workspace_limits(stage)
        size = -(-len(limits) // MAX_LIMITS)
        ranges = [limits[first : first + size] for first in range(0, len(limits), size)]
        seconds = np.full(len(self.counts), np.inf)
        for smallest, *_, largest in ([r[0], *r] for r in reversed(ranges)):
            # Where the fastest choices fit within a larger limit, no smaller limit is better.
            [slower] = np.nonzero(seconds > self.fastest_backward)
            if not len(slower):
                break
            limited = min_backward(
                problem, self.counts[slower], in_flight, budget[slower] - smallest, largest
            )
            seconds[slower] = np.minimum(seconds[slower], limited)
        return seconds

    @cached_property
    def fastest_backward(self) -> Numbers:
        """[rows]: seconds of the layers' backward passes with the fastest choices."""
        kind_seconds = np.array([_fastest_backward(kind) for kind in self.problem.kinds])
        seconds: Numbers = (self.counts @ kind_seconds) * (1 + ROUNDING)
        return seconds

    @cached_property
    def forward(self) -> Numbers:
        """[stages, first, end]: seconds per forward pass."""
        problem = self.problem
        layers = self.counts @ np.array([kind.forward for kind in problem.kinds])
        return np.array(
            [
                (layers + sum(end.forward for end in problem.end_costs(stage)))[self.row]
                for stage in range(problem.stages)
            ]
        )

    @cached_property
    def remaining(self) -> Numbers:
        """[stages + 1, first]: bound on the seconds from a stage's first pass to the end of the
        passes, if the stage begins with this layer."""
        return self._bounds_from_the_end[0]

    @cached_property
    def alone(self) -> Numbers:
        """[stages, first, end]: bound on the seconds from a stage's first to its last pass."""
        return self._bounds_from_the_end[1]

    @cached_property
    def _bounds_from_the_end(self) -> tuple[Numbers, Numbers]:
        """`remaining` and `alone`, from the last stage to the first."""
        problem = self.problem
        stages, num_layers = problem.stages, len(problem.layers)
        remaining = np.full((stages + 1, num_layers + 1), np.inf)
        round_trips = np.full((stages + 1, num_layers + 1), np.inf)
        """[stages + 1, first]: seconds of a micro-batch from a stage to the last and back."""
        remaining[stages, num_layers] = round_trips[stages, num_layers] = 0.0
        alone = np.empty_like(self.times)
        for stage in reversed(range(stages)):
            times = self.times[stage]
            hop = 2 * problem.message if stage < stages - 1 else 0.0
            trip = times + hop + round_trips[stage + 1][None, :]
            round_trips[stage] = trip.min(axis=1)
            alone[stage] = _stage_bound(problem, stage, times, times - self.forward[stage], trip)
            step = np.maximum(alone[stage], times + hop + remaining[stage + 1][None, :])
            remaining[stage] = step.min(axis=1)
        return remaining, alone

    @cached_property
    def first_updates(self) -> Numbers:
        """[end]: seconds that the first stage spends outside its passes, if it ends here."""
        seconds: Numbers = _updates_by_counts(self.problem, self.counts, 0)[self.row[0]]
        return seconds

    def bound(self) -> float:
        """Return the bound on the step over all divisions; infinite if none fits."""
        times = self.times[0, 0]
        hop = 2 * self.problem.message if self.problem.stages > 1 else 0.0
        step = np.maximum(self.alone[0, 0], times + hop + self.remaining[1])
        return float((step + self.first_updates).min())


def _stage_bound(
    problem: Problem, stage: int, passes: Numbers, backward: Numbers, trip: Numbers
) -> Numbers:
    """Bound the time from a stage's first to its last pass.

    `passes` and `backward` are its seconds per micro-batch, `trip` those of a round trip from it to
    the last stage and back.
    """
    fits = np.isfinite(trip)
    trip, passes, backward = (np.where(fits, times, 0.0) for times in (trip, passes, backward))
    depth = problem.stages - stage
    lower_bound = problem.schedule.bound(problem.micro_batches, depth, passes, backward, trip)
    bound: Numbers = np.where(fits, lower_bound, np.inf)
    return bound


def find_min_memory_cuts(problem: Problem) -> tuple[float, Cuts]:
    """Return the minimum bytes on the fullest stage, and cuts that reach them."""
    bounds = Bounds(problem)
    layers = len(problem.layers)
    peaks_after = np.full(layers + 1, np.inf)
    peaks_after[layers] = 0.0
    ends: list[Integers] = []
    for stage in reversed(range(problem.stages)):
        [in_flight] = problem.in_flight(stage)
        sizes_by_counts = np.full(len(bounds.counts), np.inf)
        for workspace in bounds.workspace_limits(stage):
            total = np.full(len(bounds.counts), workspace, dtype=np.float64)
            for number, kind in enumerate(problem.kinds):
                sizes = [
                    choice.state + in_flight * choice.activations
                    for choice in kind.choices
                    if choice.workspace <= workspace
                ]
                count = bounds.counts[:, number]
                total += count * min(sizes) if sizes else np.where(count > 0, np.inf, 0.0)
            sizes_by_counts = np.minimum(sizes_by_counts, total)
        sizes_by_counts += problem.budget - bounds.layer_budget(stage)
        stage_sizes = np.where(bounds.invalid, np.inf, sizes_by_counts[bounds.row])
        peaks = np.maximum(stage_sizes, peaks_after[None, :])
        peaks_after = peaks.min(axis=1)
        ends.append(peaks.argmin(axis=1))
    first, cuts = 0, []
    for end in reversed(ends):
        first = int(end[first])
        cuts.append(first)
    return float(peaks_after[0]), tuple(cuts[:-1])
