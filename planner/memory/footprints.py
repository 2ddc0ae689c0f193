"""Activations and workspaces of layers in any layout, as bytes that the search adds up.

All come from traces. A trace takes long, so numbers begin as lower bounds: one row of one rank is
traced, and the ranks of tp and cp hold at least their share. `refine` traces what a plan uses in
its own layout, and the search repeats until its plan uses traced numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple, Protocol

from ...models.accounting.pieces import ModelPasses, Passes, find_peak
from ...models.config.options.names import LinearForm
from ...models.config.options.recompute import Rule
from ..grid.split import Split
from ..traces.work import RULES

ONE_ROW = Split()
"""One row of one rank."""


class Footprint(NamedTuple):
    """Bytes of a layer or an end in a micro-batch of a rank."""

    activations: float
    """From the forward to the backward pass."""
    workspace: float = 0.0
    """While a pass runs, beside the activations."""

    def scale(self, factor: float) -> Footprint:
        return Footprint(self.activations * factor, self.workspace * factor)


class Traces(Protocol):
    """Traced passes of a model in one layout (models/accounting/passes.py)."""

    def first(self) -> Passes: ...
    def last(self) -> Passes: ...
    def layer(self, number: int, rule: Rule) -> Passes: ...
    def trace_model(self, rules: Sequence[Rule]) -> ModelPasses: ...


def measure_footprint(passes: Passes) -> Footprint:
    """Return a layer's footprint; its workspace is the peak of either pass beside activations."""
    activations = passes.activations
    forward_workspace = find_peak(passes.forward) - activations
    return Footprint(activations, max(0, find_peak(passes.backward), forward_workspace))


def min_footprint(passes: Passes) -> Footprint:
    """Measure without the gradients of parameters, which do not shrink with a rank's rows."""
    backward = tuple(
        replace(segment, high=segment.high - segment.size) for segment in passes.backward
    )
    return measure_footprint(replace(passes, backward=backward))


class ModelFootprints(NamedTuple):
    kinds: list[dict[Rule, Footprint]]
    """Layers, by kind and recompute rule."""
    first: Footprint
    last: Footprint


class Footprints:
    """Footprints of a model in every layout: traced ones, and lower bounds elsewhere."""

    def __init__(
        self, traces: Callable[[Split, int, LinearForm], Traces], layers: Sequence[int]
    ) -> None:
        """`traces(split, ep, linear)` returns the traces of a layout, with the engine's linear
        function. `layers` has the kind of every layer."""
        self.traces = cache(traces)
        self.kind_layers = [layers.index(kind) for kind in range(max(layers) + 1)]
        """The first layer of every kind."""
        self._refined: dict[tuple[Split, int, LinearForm], ModelFootprints] = {}
        self._bound, self._measure_row = cache(self._scale_row), cache(self._trace_row)

    def estimate(self, split: Split, ep: int, linear: LinearForm) -> ModelFootprints:
        """Return a layout's refined footprints, or lower bounds before `refine` traced it."""
        refined = self._refined.get((split, ep, linear))
        return refined or self._bound(split.rows / split.ranks, linear)

    def _scale_row(self, rows: float, linear: LinearForm) -> ModelFootprints:
        """Return the lower bounds for `rows` rows, which may be a fraction."""
        row = self._measure_row(linear)
        return ModelFootprints(
            [{rule: size.scale(rows) for rule, size in kind.items()} for kind in row.kinds],
            row.first.scale(rows),
            row.last.scale(rows),
        )

    def _trace_row(self, linear: LinearForm) -> ModelFootprints:
        traces = self.traces(ONE_ROW, 1, linear)
        return ModelFootprints(
            [
                {rule: min_footprint(traces.layer(layer, rule)) for rule in RULES}
                for layer in self.kind_layers
            ],
            min_footprint(traces.first()),
            min_footprint(traces.last()),
        )

    def refine(
        self, split: Split, ep: int, linear: LinearForm, rules: Sequence[Iterable[Rule]]
    ) -> bool:
        """Trace these rules of every kind, and both ends, in this layout. Return True if a number
        changed."""
        known, traces = self.estimate(split, ep, linear), self.traces(split, ep, linear)
        kinds = [dict(sizes) for sizes in known.kinds]
        first, last = measure_footprint(traces.first()), measure_footprint(traces.last())
        for layer, sizes, used_rules in zip(self.kind_layers, kinds, rules, strict=True):
            for rule in used_rules:
                sizes[rule] = measure_footprint(traces.layer(layer, rule))
        refined = ModelFootprints(kinds, first, last)
        self._refined[split, ep, linear] = refined
        return refined != known


def pareto_front(sizes: Mapping[Rule, tuple[float, ...]]) -> Iterator[Rule]:
    """Yield the rules that no other dominates: none is as small or smaller in every size."""
    front: list[tuple[float, ...]] = []
    for rule in sorted(sizes, key=sizes.__getitem__):
        size = sizes[rule]
        if not any(all(a <= b for a, b in zip(point, size, strict=True)) for point in front):
            front.append(size)
            yield rule
