"""Bytes of layers in any layout, as numbers that the search adds up. All come from traces.

A trace of a layout takes long, so numbers begin as bounds: one row of one rank is traced, and the
ranks of tp and cp keep at least their part of it. What a found plan uses is then traced in its own
layout (`refine`), and the plan is searched again until it uses traced numbers alone.
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

WHOLE = Split(1, 1, 1, "a2a", "states")
"""One row of one rank."""


class Footprint(NamedTuple):
    """Bytes of a part of the model in a micro-batch of a rank."""

    kept: float
    """From the forward to the backward pass."""
    work: float = 0.0
    """While a pass runs, beside what is kept."""


class Traces(Protocol):
    """Traced passes of a model in one layout (models/accounting/passes.py)."""

    def first(self) -> Passes: ...
    def last(self) -> Passes: ...
    def layer(self, number: int, rule: Rule) -> Passes: ...
    def whole(self, rules: Sequence[Rule]) -> ModelPasses: ...


def footprint(passes: Passes) -> Footprint:
    kept = passes.activations
    return Footprint(kept, max(0, find_peak(passes.backward), find_peak(passes.forward) - kept))


def least(passes: Passes) -> Footprint:
    """Return the footprint without the gradients of parameters, which rows do not divide."""
    backward = tuple(replace(piece, high=piece.high - piece.size) for piece in passes.backward)
    return footprint(replace(passes, backward=backward))


class Rows(NamedTuple):
    """Footprints of the parts of a model."""

    kinds: list[dict[Rule, Footprint]]
    first: Footprint
    last: Footprint


class Footprints:
    """Footprints of a model's kinds of layers in each layout."""

    def __init__(
        self, traces: Callable[[Split, int, LinearForm], Traces], layers: Sequence[int]
    ) -> None:
        """`traces` of a split, a degree of experts and the linear layers of an engine; `layers`
        have the kind of each layer."""
        self.traces = cache(traces)
        self.places = [layers.index(kind) for kind in range(max(layers) + 1)]
        """A layer of each kind."""
        self._known: dict[tuple[Split, int, LinearForm], Rows] = {}
        """Layouts with numbers of their own."""
        self.part, self.whole = cache(self._part), cache(self._whole)

    def of(self, split: Split, ep: int, linear: LinearForm) -> Rows:
        """Return the footprints of each kind by rule, and of both ends."""
        return self._known.get((split, ep, linear)) or self.part(split.rows / split.ranks, linear)

    def _part(self, part: float, linear: LinearForm) -> Rows:
        """Return the bound of a part of a row, or of several rows."""
        whole = self.whole(linear)
        return Rows(
            [{rule: _part(size, part) for rule, size in kind.items()} for kind in whole.kinds],
            _part(whole.first, part),
            _part(whole.last, part),
        )

    def _whole(self, linear: LinearForm) -> Rows:
        """Return the footprints of one row of one rank."""
        traces = self.traces(WHOLE, 1, linear)
        return Rows(
            [{rule: least(traces.layer(place, rule)) for rule in RULES} for place in self.places],
            least(traces.first()),
            least(traces.last()),
        )

    def refine(
        self, split: Split, ep: int, linear: LinearForm, rules: Sequence[Iterable[Rule]]
    ) -> bool:
        """Trace these rules of each kind, and both ends, in this layout. Return True if a number
        changed."""
        known, traces = self.of(split, ep, linear), self.traces(split, ep, linear)
        kinds = [dict(sizes) for sizes in known.kinds]
        ends = footprint(traces.first()), footprint(traces.last())
        changed = ends != (known.first, known.last)
        for place, sizes, used_rules in zip(self.places, kinds, rules, strict=True):
            for rule in used_rules:
                exact = footprint(traces.layer(place, rule))
                changed |= exact != sizes[rule]
                sizes[rule] = exact
        self._known[split, ep, linear] = Rows(kinds, *ends)
        return changed


def _part(whole: Footprint, part: float) -> Footprint:
    return Footprint(whole.kept * part, whole.work * part)


def unbeaten(sizes: Mapping[Rule, tuple[float, ...]]) -> Iterator[Rule]:
    """Yield the rules on the Pareto front: no other is as small or smaller in every size."""
    front: list[tuple[float, ...]] = []
    for rule in sorted(sizes, key=sizes.__getitem__):
        size = sizes[rule]
        if not any(all(a <= b for a, b in zip(point, size, strict=True)) for point in front):
            front.append(size)
            yield rule
