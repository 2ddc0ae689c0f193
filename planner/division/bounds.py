"""Lower bounds on price that prune the search.

Linear programming bounds a stage's time (linear.py). The schedule's closed form then bounds the
step: simulated steps reach or exceed it. Bounds never decide which plan is best.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np

from ...trainer.layout.cuts import Cuts
from .linear import ROUNDING, min_backward, min_seconds, min_seconds_over_limits, workspace_limits
from .problem import Flags, Integers, Numbers, Problem


def quick_bound(problem: Problem) -> float:
    """Return a lower bound on the step in one pass over the kinds; infinite if nothing fits.

    All stages together have stages × budget bytes, and every stage holds a micro-batch or more.
    """
    stages, in_flight, counts = problem.stages, problem.min_in_flight, problem.layer_counts
    min_workspace = min(c.workspace for kind in problem.kinds for c in kind.choices)
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
    return _step_bound(
        problem, sum(count * min(c.backward for c in kind.choices) for count, kind in layers)
    )


def _step_bound(problem: Problem, backward: float) -> float:
    """Bound the step from the seconds that all backward passes take per micro-batch."""
    stages, m, counts = problem.stages, problem.micro_batches, problem.layer_counts
    total = backward + _forward_seconds(problem, counts)
    if stages == 1:
        return m * total + _update_seconds(problem, counts)
    if problem.chunks > 1:
        return _interleaved_bound(problem, total)
    # Minimum of max over s (passes before stage s + m passes on stage s), without messages.
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
    layer. The mean over stages is at most the slowest stage.
    """
    stages, m = problem.stages, problem.micro_batches
    min_layer = min(kind.forward + min(c.backward for c in kind.choices) for kind in problem.kinds)
    mean = m * total / stages + (stages - 1) / 2 * (min_layer + 2 * problem.message)
    max_layers = -(-len(problem.layers) // stages)
    return max(mean, m * max_layers * min_layer)


def updates(problem: Problem, counts: Integers, stage: int) -> Numbers:
    """Return the seconds that a stage spends outside its passes, by range of layers."""
    kind_updates = np.array([kind.update for kind in problem.kinds])
    end_updates = sum(
        end.update for chunk in problem.stage_chunks(stage) for end in problem.end_costs(chunk)
    )
    seconds: Numbers = counts @ kind_updates + end_updates
    for number, module in enumerate(problem.modules):
        seconds = seconds + module.update * calls(problem, counts, number)
    return seconds


def calls(problem: Problem, counts: Integers, module: int) -> Numbers:
    """Return 1.0 for every range with a layer that calls the module, else 0.0."""
    users = np.array([kind.module == module for kind in problem.kinds])
    flags: Numbers = (counts[:, users].sum(axis=1) > 0).astype(np.float64)
    return flags


@lru_cache(maxsize=64)
def _ranges(layers: tuple[int, ...], kinds: int, longest: int) -> tuple[Integers, Integers, Flags]:
    """Count the layers by kind in all ranges [first, end) of at most `longest` layers.

    Return the distinct counts, their index by range, and a flag for ranges that are empty or too
    long.
    """
    one_hot = np.eye(kinds, dtype=np.int64)[list(layers)]
    prefix = np.concatenate([np.zeros((1, kinds), dtype=np.int64), one_hot.cumsum(axis=0)])
    ends = np.arange(len(prefix))
    lengths = ends - ends[:, None]
    none = (lengths <= 0) | (lengths > longest)
    between = np.where(none[:, :, None], 0, prefix[None, :, :] - prefix[:, None, :])
    counts, index = np.unique(between.reshape(-1, kinds), axis=0, return_inverse=True)
    return counts, index.reshape(none.shape), none


class Bounds:
    """Lower bounds for all ranges [first, end) of layers; every stage has one chunk."""

    def __init__(self, problem: Problem) -> None:
        assert problem.chunks == 1
        self.problem = problem
        longest = len(problem.layers) - problem.stages + 1
        self.counts, self.index, self.empty = _ranges(problem.layers, len(problem.kinds), longest)

    def layer_budget(self, stage: int) -> Numbers:
        """Return the bytes left for a stage's layers and their largest workspace."""
        problem = self.problem
        [in_flight] = problem.in_flight(stage)
        ends = list(problem.end_costs(stage))
        free = problem.stage_budget(stage) - np.zeros(len(self.counts))
        free -= sum(end.state + in_flight * end.activations for end in ends)
        for number, module in enumerate(problem.modules):
            free = free - module.state * calls(problem, self.counts, number)
        return free

    def workspaces(self, stage: int) -> list[float]:
        min_workspace = max((end.workspace for end in self.problem.end_costs(stage)), default=0.0)
        return workspace_limits(self.problem, set(self.problem.layers), min_workspace)

    @cached_property
    def times(self) -> Numbers:
        """[stages, first, end]: minimum seconds of both passes, with these layers as a stage."""
        problem = self.problem
        forward = self.counts @ np.array([kind.forward for kind in problem.kinds])
        stage_times = []
        for stage in range(problem.stages):
            [in_flight] = problem.in_flight(stage)
            backward = self._backward(stage, in_flight)
            end_seconds = sum(end.forward + end.backward for end in problem.end_costs(stage))
            stage_times.append(
                np.where(self.empty, np.inf, (forward + backward + end_seconds)[self.index])
            )
        return np.array(stage_times)

    def _backward(self, stage: int, in_flight: int) -> Numbers:
        """Return the minimum seconds of the backward passes, by range of layers."""
        problem, budget = self.problem, self.layer_budget(stage)
        largest, *smaller = reversed(self.workspaces(stage))
        seconds = min_backward(problem, self.counts, in_flight, budget - largest, largest)
        for workspace in smaller:
            # Where the fastest choices fit beside the largest workspace, no limit is better.
            [slower] = np.nonzero(seconds > self.fastest)
            if not len(slower):
                break
            limited = min_backward(
                problem, self.counts[slower], in_flight, budget[slower] - workspace, workspace
            )
            seconds[slower] = np.minimum(seconds[slower], limited)
        return seconds

    @cached_property
    def fastest(self) -> Numbers:
        """Seconds of the backward passes with the fastest choices, by range."""
        kind_seconds = np.array(
            [min(c.backward for c in kind.choices) for kind in self.problem.kinds]
        )
        seconds: Numbers = (self.counts @ kind_seconds) * (1 + ROUNDING)
        return seconds

    @cached_property
    def forward(self) -> Numbers:
        """[stages, first, end]: seconds per forward pass."""
        problem = self.problem
        layers = self.counts @ np.array([kind.forward for kind in problem.kinds])
        return np.array(
            [
                (layers + sum(end.forward for end in problem.end_costs(stage)))[self.index]
                for stage in range(problem.stages)
            ]
        )

    @cached_property
    def remaining(self) -> Numbers:
        """[stages + 1, first]: bound from a stage on, if it begins with this layer."""
        self._fill()
        return self._remaining

    @cached_property
    def alone(self) -> Numbers:
        """[stages, first, end]: bound from a stage's first to its last pass."""
        self._fill()
        return self._alone

    def _fill(self) -> None:
        problem = self.problem
        p, layers = problem.stages, len(problem.layers)
        times, hop = self.times, 2 * problem.message
        remaining = np.full((p + 1, layers + 1), np.inf)
        trips = np.full((p + 1, layers + 1), np.inf)
        remaining[p, layers] = trips[p, layers] = 0.0
        alone = np.empty_like(times)
        for stage in reversed(range(p)):
            stage_times = times[stage]
            between = hop if stage < p - 1 else 0.0
            trip = stage_times + between + trips[stage + 1][None, :]
            trips[stage] = trip.min(axis=1)
            alone[stage] = stage_bound(
                problem, stage, stage_times, stage_times - self.forward[stage], trip
            )
            step = np.maximum(alone[stage], stage_times + between + remaining[stage + 1][None, :])
            remaining[stage] = step.min(axis=1)
        self._remaining, self._alone = remaining, alone

    @cached_property
    def first_updates(self) -> Numbers:
        """[end]: seconds that the first stage spends outside its passes, if it ends here."""
        seconds: Numbers = updates(self.problem, self.counts, 0)[self.index[0]]
        return seconds

    def bound(self) -> float:
        """Return the bound over all divisions."""
        stage_times = self.times[0, 0]
        hop = 2 * self.problem.message if self.problem.stages > 1 else 0.0
        step = np.maximum(self.alone[0, 0], stage_times + hop + self.remaining[1])
        return float((step + self.first_updates).min())


def stage_bound(
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
        for workspace in bounds.workspaces(stage):
            total = np.full(len(bounds.counts), workspace, dtype=np.float64)
            for number, kind in enumerate(problem.kinds):
                sizes = [
                    c.state + in_flight * c.activations
                    for c in kind.choices
                    if c.workspace <= workspace
                ]
                count = bounds.counts[:, number]
                total += count * min(sizes) if sizes else np.where(count > 0, np.inf, 0.0)
            sizes_by_counts = np.minimum(sizes_by_counts, total)
        sizes_by_counts += problem.budget - bounds.layer_budget(stage)
        stage_sizes = np.where(bounds.empty, np.inf, sizes_by_counts[bounds.index])
        peaks = np.maximum(stage_sizes, peaks_after[None, :])
        peaks_after = peaks.min(axis=1)
        ends.append(peaks.argmin(axis=1))
    first, cuts = 0, []
    for end in reversed(ends):
        first = int(end[first])
        cuts.append(first)
    return float(peaks_after[0]), tuple(cuts[:-1])
