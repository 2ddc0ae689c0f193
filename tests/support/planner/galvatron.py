"""Galvatron-2's profiles and cost functions, behind this project's search of choices.

An adapter for tests: the formulas are those of the search engine of PKU-DAIR/Hetu-Galvatron 2.4
(Apache-2.0), its cost model and its dynamic program, for one kind of layer. The data are its own
profiles and results (`galvatron_cases.json`). Times are milliseconds, sizes MB.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from headrace.planner.division.bounds import quick_bound
from headrace.planner.division.choices import EXCESSIVE
from headrace.planner.division.problem import Choice, FixedCosts, LayerKind, Problem
from headrace.planner.division.solve import Divisions
from headrace.trainer.layout.cuts import neighbour_cuts

DATA = json.loads((Path(__file__).parent / "galvatron_cases.json").read_text())
GPUS, CONTEXT = 8, 1024
GATHERS = 6
"""Messages of tensor parallelism in both passes of a layer."""
BACKWARD = 2
"""Backward passes take so many forward passes."""


@dataclass(frozen=True)
class Point:
    """All that Galvatron's outer loops fix."""

    pp: int
    tp: int
    min_tp: int
    max_tp: int
    vocabulary_tp: int
    shard_embedding: bool

    @property
    def dp(self) -> int:
        return GPUS // (self.pp * self.tp)


@dataclass(frozen=True)
class Layer:
    """Choices of a layer: ZeRO-3 or not, recompute or not."""

    zero3: bool
    recompute: bool


class Galvatron:
    """One of its cases."""

    def __init__(self, case: dict[str, Any]) -> None:
        inputs = case["inputs"]
        settings = inputs["search_args"]
        [self.width], [self.layers] = inputs["model"]["hidden_size"], [settings["num_layers"]]
        [self.length] = inputs["model"]["seq_len"]
        self.batch, self.micro = settings["settle_bsz"], settings["settle_chunk"]
        self.fine = bool(settings["fine_grained_mode"])
        memory = 1024 * settings["memory_constraint"]
        # More than 20 GB: a fifth is left to the allocator.
        self.memory = memory - (int(0.2 * memory) if memory // 1024 > 20 else 0)
        self.hardware = DATA["profiles"]["hardware"]
        profile = DATA["profiles"]["memory_sequence_sp"]
        self.longest = max(map(int, profile["layertype_0_sp"]))
        shortest = min(profile["layertype_0_sp"], key=int)
        self.parameters = profile["layertype_0_sp"][shortest]["parameter_size"]
        longest = profile["layertype_0_sp"][str(self.longest)]["tp_activation_per_bsz_dict"]
        self.kept = {name: size / self.longest * self.length for name, size in longest.items()}
        self.end_memory = {
            place: profile[f"other_memory_pp_{place}_sp"][str(self.longest)]
            for place in ("off", "on_first", "on_last")
        }

    @cached_property
    def forward(self) -> float:
        """Milliseconds of a layer for one row: a parabola through the profile."""
        return float(np.polyval(self._fit("layertype_0_bsz1", 2), self.length))

    @cached_property
    def ends(self) -> float:
        return float(np.polyval(self._fit("layertype_other_bsz1", 1), self.length))

    def _fit(self, name: str, degree: int) -> Any:
        times = DATA["profiles"]["time_sequence"]
        rows = [(int(k.split("seq")[-1]), v) for k, v in times.items() if k.startswith(name)]
        return np.polyfit(*zip(*rows, strict=True), degree)

    def per_mb(self, ranks: int, *, whole: bool) -> float:
        """Return the milliseconds of a MB of an all-reduce: of all ranks of a stage, or of those
        that stand a tensor group apart."""
        if ranks == 1:
            return 0.0
        flag = 1 if whole else 0
        return 1 / float(self.hardware["allreduce"][f"allreduce_size_{ranks}_consec_{flag}"])

    def gather(self, ranks: int, size: float) -> float:
        """Return the milliseconds of an all-gather of so many MB: half of an all-reduce, as it was
        measured, else by the line through all sizes."""
        if ranks == 1:
            return 0.0
        name = f"allreduce_size_{ranks}_"
        known = {
            int(key.removeprefix(name).removesuffix("MB_time")): value / 2
            for key, value in self.hardware["sp"].items()
            if key.startswith(name)
        }
        if size in known:
            return float(known[int(size)])
        return float(np.polyval(np.polyfit(list(known), list(known.values()), 1), size))

    # -- times -------------------------------------------------------------------------------

    def times(self, point: Point, layer: Layer) -> tuple[float, float, float]:
        """Return the seconds of a micro-batch's passes of a layer: forward; both with and without
        the messages of the data axis."""
        dp, tp = point.dp, point.tp
        rows = self.batch / self.micro / dp
        forward = self.forward * rows / tp
        backward = BACKWARD * forward + forward * layer.recompute
        gathers = GATHERS * (1.5 if layer.recompute else 1)
        tensor = gathers * self.gather(tp, rows * self.length * self.width * 2 / 2**20)
        message = 2 * (dp - 1) / dp * self.parameters / tp / 2
        rate = self.per_mb(dp, whole=tp == 1)
        gather = 0.5 * message * rate if layer.zero3 else 0.0

        def total(message: float) -> float:
            if dp == 1:
                return forward + backward + tensor
            hidden = backward if tp == 1 or tp < tp * dp // 2 else backward / 2
            return forward + backward - hidden + self._together(hidden, message * rate) + tensor

        hops = 0.0
        if point.pp > 1:
            moved = point.pp * 2 * rows * self.length * self.width * 4 / 2**20 / 2
            hops = moved / self.hardware["p2p"][f"pp_size_{point.pp}"] / self.layers
        more = gather + hops
        return forward / 1e3, (total(message) + more) / 1e3, (total(0.0) + more) / 1e3

    def _together(self, backward: float, message: float) -> float:
        """Return the milliseconds of a backward pass beside a message."""
        slower = self.hardware["overlap"]["overlap_coe"]
        if message * slower > backward * slower:
            return backward * slower + (message - backward)
        return message * slower + backward - message

    def of_ends(self, point: Point) -> tuple[float, ...]:
        """Return the seconds of the embedding and the head of a micro-batch on each stage."""
        pp, k = point.pp, point.vocabulary_tp
        rows = self.rows(point)
        local_rows = rows * k // point.min_tp
        tensor = self.gather(k, local_rows * self.length * self.width * 2 / 2**20)
        data = GPUS // pp // k
        rate = self.per_mb(data, whole=k == 1) * (data - 1) / data
        slower = self.hardware["overlap"]["overlap_coe"]
        shares = [1.0] if pp == 1 else [0.5, 0.5]
        place = "off" if pp == 1 else "on_first"
        states = self.end_memory[place]["model_states"][str(k)] / 4
        result = [0.0] * pp
        for number, share in zip((0, -1), shares, strict=False):
            forward = rows / point.min_tp * self.ends * share
            factors = (0.5, 0.0) if point.shard_embedding else (0.0, 0.0)
            both = 0.0
            for compute, factor in zip((forward, BACKWARD * forward), factors, strict=True):
                message, longer = states * rate * factor, compute * slower
                both += max(message, message + (longer - message) / slower)
            result[number] = (both + tensor * (2 if pp == 1 else 1)) / 1e3
        return tuple(result)

    def rows(self, point: Point) -> int:
        """Return the rows of a micro-batch of the ranks with the smallest tensor degree."""
        local = self.batch // (GPUS // point.pp // point.min_tp)
        return (local + self.micro - 1) // self.micro

    def price(self, point: Point, cuts: Sequence[int], layers: Sequence[Layer]) -> float:
        """Return the seconds of a step by its `pipeline_costmodel`."""
        ends = (0, *cuts, len(layers))
        times = [self.times(point, layer) for layer in layers]
        reduce, compute = (
            [sum(time[n] for time in times[a:b]) for a, b in pairwise(ends)] for n in (1, 2)
        )
        compute = [a + b for a, b in zip(compute, self.of_ends(point), strict=True)]
        pp, m = point.pp, self.micro
        ahead, later = min(pp - 1, m - 1) * compute[0], sum(compute[1:])
        first = sum(compute) + compute[-1] * (m - 1)
        step = max(first, max(ahead, later) + compute[0] * max(0, m + 1 - pp))
        waits = [reduced - sum(compute[: n + 1]) for n, reduced in enumerate(reduce)]
        return step + max(0.0, *waits)

    # -- memory ------------------------------------------------------------------------------

    def ratio(self, ranks: int, *, zero3: bool) -> float:
        """Return the part of the states that a rank holds: ZeRO-3, else ZeRO-2."""
        if ranks == 1:
            return 1.0
        share = 1 / ranks + 0.003
        if zero3:
            return share * (1 if self.micro == 1 else 5 / 4)
        return (7 / 8 * share + 1 / 8) * (1 if self.micro == 1 else 5 / 4)

    def sizes(self, point: Point, layer: Layer) -> tuple[float, float]:
        """Return the MB of a layer's states, and of the activations of one micro-batch."""
        rows = self.batch / point.dp / self.micro
        states = 4 * self.parameters / point.tp * self.ratio(point.dp, zero3=layer.zero3)
        if layer.recompute:
            return states, self.kept["checkpoint"] * rows / point.tp
        return states, self.kept[str(point.tp)] * rows

    def of_stages(self, point: Point) -> list[int]:
        """Return the whole MB beside the layers of each stage."""
        k, pp = point.vocabulary_tp, point.pp
        ratio = self.ratio(GPUS // pp // k, zero3=point.shard_embedding)
        rows = self.batch * k / (GPUS // pp) / self.micro
        result = [0.0] * pp
        for place, number, alive in (
            [("off", 0, 1)] if pp == 1 else [("on_first", 0, pp), ("on_last", -1, 1)]
        ):
            kept = self.end_memory[place]["activation"][str(k)]
            if place == "off":
                kept = 2 / 3 * kept + 1 / 3 * kept / self.longest * self.length
            if place == "on_last":
                kept = kept / self.longest * self.length
            result[number] += (
                self.end_memory[place]["model_states"][str(k)] * ratio + kept * rows * alive
            )
        buffer = self.rows(point) / point.min_tp * point.max_tp * self.width * self.length
        return [math.ceil(item + CONTEXT) + int(buffer * 4 / 2**20 / 2) for item in result]

    def fits(self, point: Point, cuts: Sequence[int], layers: Sequence[Layer]) -> bool:
        """True if each stage fits by its rounding: whole MB of each layer."""
        ends = (0, *cuts, len(layers))
        for stage, (overhead, (a, b)) in enumerate(
            zip(self.of_stages(point), pairwise(ends), strict=True)
        ):
            alive = min(self.micro, point.pp - stage)
            sizes = (self.sizes(point, layer) for layer in layers[a:b])
            if overhead + sum(math.ceil(held + alive * kept) for held, kept in sizes) > self.memory:
                return False
        return True

    # -- search ------------------------------------------------------------------------------

    def points(self) -> Iterator[Point]:
        """Yield its loops over degrees: those that make the asked number of micro-batches."""
        degrees = [1, 2, 4, 8]
        for min_tp in degrees:
            for max_tp in degrees:
                for tp in degrees:
                    for pp in degrees:
                        if not min_tp <= tp <= max_tp or pp * tp > GPUS:
                            continue
                        local = self.batch // (GPUS // pp // min_tp)
                        if not local or self.batch % (GPUS // pp // min_tp) or self.micro > local:
                            continue
                        for vocabulary in degrees:
                            if not min_tp <= vocabulary <= max_tp or vocabulary * pp > GPUS:
                                continue
                            for shard in (False, True):
                                yield Point(pp, tp, min_tp, max_tp, vocabulary, shard)

    def problem(self, point: Point, *, reduces: bool) -> Problem:
        """Return the search's problem of a point. With `reduces`, passes have their part of the
        gradients' messages, which Galvatron counts once for a step."""
        layers = [
            Layer(zero3, recompute)
            for zero3 in ((False, True) if point.dp > 1 else (False,))
            for recompute in (False, True)
        ]
        stages = self.of_stages(point)
        min_state = min(stages)
        ends = self.of_ends(point)
        choices = []
        for layer in layers:
            forward, both, compute = self.times(point, layer)
            seconds = ((self.micro - 1) * compute + both) / self.micro if reduces else compute
            choices.append(
                Choice(name=layer, backward=seconds - forward, **self._whole(point, layer))
            )
        return Problem(
            kinds=(LayerKind(forward=forward, choices=tuple(choices)),),
            layers=(0,) * self.layers,
            micro_batches=self.micro,
            budget=self.memory - min_state,
            stages=point.pp,
            first=FixedCosts(forward=ends[0], state=stages[0] - min_state),
            last=FixedCosts(forward=ends[-1], state=stages[-1] - min_state)
            if point.pp > 1
            else FixedCosts(),
        )

    def _whole(self, point: Point, layer: Layer) -> dict[str, float]:
        """Return the whole MB of a layer, exactly as it rounds them for one and for two stages."""
        held, kept = self.sizes(point, layer)
        one_stage, two_stages = math.ceil(held + kept), math.ceil(held + min(self.micro, 2) * kept)
        if point.pp == 1:
            return {"state": one_stage}
        if point.pp == 2:
            return {"state": 2 * one_stage - two_stages, "activations": two_stages - one_stage}
        return {"state": math.ceil(held), "activations": math.ceil(kept)}

    def search(
        self, *, uniform: bool = False
    ) -> tuple[float, Point, tuple[int, ...], tuple[Layer, ...]]:
        """Return the least price, with its point, cuts, and the choice of each layer; `uniform`:
        one choice for all layers, and the vocabulary split as the layers, as its coarse mode."""
        waiting = sorted(self._bounded(), key=lambda bounded: bounded[0])
        best: tuple[float, Point, tuple[int, ...], tuple[Layer, ...]] | None = None
        for bound, point, problem in waiting:
            if best is not None and bound >= best[0]:
                break
            if uniform and point.vocabulary_tp != point.tp:
                continue
            for cuts, layers in self.divisions(problem, uniform=uniform):
                seconds = self.price(point, cuts, layers)
                if (best is None or seconds < best[0]) and self.fits(point, cuts, layers):
                    best = seconds, point, cuts, layers
        assert best is not None
        return best

    def _bounded(self) -> Iterator[tuple[float, Point, Problem]]:
        """Yield the problems of all points that may fit, with a bound of their price."""
        for point in self.points():
            for reduces in (True, False):
                problem = self.problem(point, reduces=reduces)
                bound = quick_bound(problem)
                if bound < EXCESSIVE:
                    fastest = min(c.backward for c in problem.kinds[0].choices)
                    layers = self.layers * (fastest + problem.kinds[0].forward)
                    yield layers * self.micro / point.pp - self.of_ends(point)[0], point, problem

    def divisions(
        self, problem: Problem, *, uniform: bool
    ) -> Iterator[tuple[tuple[int, ...], tuple[Layer, ...]]]:
        """Yield even divisions, and for two stages those beside it, with the exact choices of their
        stages. Its price of more stages does not count those in the middle."""
        even = tuple(self.layers // problem.stages * n for n in range(1, problem.stages))
        if uniform:
            yield from ((even, (c.name,) * self.layers) for c in problem.kinds[0].choices)
            return
        divisions = Divisions(problem)
        for cuts in [even, *(neighbour_cuts(even, self.layers) if problem.stages == 2 else ())]:
            plans = [plan for [plan] in divisions.plan_stages(cuts)]
            if any(plan.memory > problem.budget for plan in plans):
                continue
            chosen = [choice.name for plan in plans for choice in plan.choices[0][0]]
            yield cuts, tuple(chosen)
