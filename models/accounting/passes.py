"""Memory of the parts of a model: each sort of layer, the embedding, and the loss, traced once.

One layer of each sort runs forward and backward on fake tensors (fake/), with the rows, the
shards and the recompute rule of one rank. Layers that are alike share a trace; a process traces
each model, shape and rule once.

Stored traces are read without torch; a part without one runs (fake/).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from ...console.errors import LayoutError
from ..config.config import ModelConfig
from ..config.options.hyena import ModalOptions
from ..config.options.precision import Fp8Config, Precision
from ..config.options.recompute import Rule
from ..parallel.tiles import TILE
from .extrapolate import fitted
from .hops import LONG, RING, joined, lengthened
from .pieces import EMBEDDINGS, ModelPasses, Passes
from .shape import Shape
from .sorts import one_of_each
from .stored import stored, stored_passes

if TYPE_CHECKING:
    from .fake.model import FakeModel

MAX_LENGTH = 4096
"""Tokens of the longest row that runs where operators walk through it in steps. Longer rows are
extrapolated from shorter ones: from two, or from three where masks grow with the square. Both are
long enough to show the highest moment of longer rows: beside a short row, the gradient of a weight
is larger."""
MAX_ROWS = 64
"""Most rows that run; the bytes of more rows are extrapolated from two numbers of rows, which are
large for the same reason."""

_known: dict[str, Passes] = {}


def model_passes(config: ModelConfig, shape: Shape, rules: Sequence[Rule]) -> ModelPasses:
    """Trace a model with a recompute rule for each layer."""
    return Tracer(config, shape).whole(rules)


def _problems(config: ModelConfig, shape: Shape) -> Iterator[str]:
    """Yield each reason why the ranks cannot divide the rows. A run checks them before."""
    tp, cp = shape.degrees.tp, shape.degrees.cp
    if shape.seq_len % (tp * cp):
        yield f"rows of {shape.seq_len:,} tokens do not divide by tp × cp = {tp * cp}"
    for name, options in config.operators.items():
        heads = options.attention_heads
        if shape.attention == "a2a" and heads and heads % (tp * cp):
            yield f"operators.{name}: tp={tp} × cp={cp} does not divide its {heads} heads"


def renamed(passes: Passes, prefixes: Mapping[str, str]) -> Passes:
    def name(own: str) -> str:
        if not own or own == EMBEDDINGS:
            return own
        shared = own.startswith("shared.")
        return prefixes["shared."] + own.removeprefix("shared.") if shared else prefixes[""] + own

    return Passes(
        passes.forward,
        tuple(replace(each, gradient=name(each.gradient)) for each in passes.backward),
    )


def rows_that_run(rows: int, max_rows: int = MAX_ROWS) -> list[int]:
    """Return the numbers of rows from which the bytes of so many rows follow."""
    return [rows] if rows <= max_rows else [max_rows - 1, max_rows]


class Tracer:
    """Traces the parts of a model at the lengths and rows that run."""

    def __init__(
        self,
        config: ModelConfig,
        shape: Shape,
        *,
        max_rows: int = MAX_ROWS,
        max_length: int = MAX_LENGTH,
        max_ring: int = LONG,
    ) -> None:
        """More rows, longer rows and larger rings than these follow from smaller ones that run."""
        if wrong := list(_problems(config, shape)):
            raise LayoutError("\n  ".join(["the layout does not divide the model's rows", *wrong]))
        shape = replace(shape, degrees=replace(shape.degrees, dp=1))  # it divides no micro-batch
        self.config, self.shape = config, shape
        self.max_rows, self.max_length, self.max_ring = max_rows, max_length, max_ring
        self.sorts = _sorts(config, shape.precision)
        self.traced = config
        """The model that runs, with a layer of each sort."""
        self.places = {sort: self.sorts.index(sort) for sort in self.sorts}
        if shape.precision.fp8 is None:  # whether a product is in FP8 depends on the layer
            self.traced = one_of_each(config)
            self.places = {sort: place for place, sort in enumerate(self.places)}
        self.models: dict[tuple[int, int, int], FakeModel] = {}
        self.of_sort, self.named = cache(self._of_sort), cache(self._named)
        self.first, self.last = cache(self._first), cache(self._last)

    def whole(self, rules: Sequence[Rule]) -> ModelPasses:
        """Return the passes of the model with a recompute rule for each layer."""
        numbers = range(len(self.config.layers))
        layers = [self.named(*each) for each in zip(numbers, rules, strict=True)]
        return ModelPasses(self.first(), layers, self.last(), list(map(str, self.config.layers)))

    def _named(self, number: int, rule: Rule) -> Passes:
        """Return the passes of a layer, under names of the model's parameters."""
        shared = self.config.layers[number].shared
        own = {"": f"blocks.{number}.", "shared.": f"shared.{shared}."}
        return renamed(self.layer(number, rule), own)

    def layer(self, number: int, rule: Rule) -> Passes:
        """Return the passes of a layer, under names of the layer's own parameters."""
        return self.of_sort(self.sorts[number], rule)

    def _of_sort(self, sort: str, rule: Rule) -> Passes:
        first, place = self.sorts.index(sort), self.places[sort]
        names = self.config.layers[first].names
        part, hops = self._key(f"{first} {rule!r}", names), self._is_long_ring(names)
        lengths = self._lengths(names)
        return self._fitted(part, lengths, lambda model: model.layer(place, rule, hops=hops), hops)

    def _first(self) -> Passes:
        return self._fitted(self._key("first"), self._lengths(), lambda model: model.first())

    def _last(self) -> Passes:
        return self._fitted(self._key("last"), self._lengths(), lambda model: model.last())

    def _lengths(self, operators: Sequence[str] = ()) -> list[int]:
        """Return the lengths at which a part runs: that of the rows, if no operator takes more
        operations for longer rows."""
        shape, own = self.shape, [self.config.operators[name] for name in operators]
        attends = any(each.attention_heads for each in own)
        longest = self.max_length
        ring = attends and shape.attention == "ring" and shape.device != "cuda"
        if ring:  # with two tiles in each chunk; scores of fewer grow with the square of the length
            longest = max(longest, 4 * shape.degrees.cp * TILE)
        if shape.seq_len <= longest or not (ring or any(each.steps(shape.device) for each in own)):
            return [shape.seq_len]
        longest += -longest % (2 * shape.degrees.tp * shape.degrees.cp)
        masks = any(getattr(each, "window", None) for each in own)
        return [longest // 2, longest, *([2 * longest] if masks else [])]

    def _is_long_ring(self, operators: Sequence[str]) -> bool:
        """True for a layer with a long ring that has nothing but parts of rows."""
        own = [self.config.operators[name] for name in operators]
        parts = all(each.tokenwise or each.attention_heads for each in own)
        windows = any(getattr(each, "window", None) for each in own)
        ring = self.shape.attention == "ring" and any(each.attention_heads for each in own)
        return ring and parts and not windows and self.shape.degrees.cp > self.max_ring

    def _key(self, part: str, operators: Sequence[str] = ()) -> str:
        """Return the name of a part, without what its operators do not read of the shape: layouts
        that differ in nothing else share the part's traces."""
        own = [self.config.operators[name] for name in operators]
        shape = replace(self.shape, rows=1, seq_len=1)
        if not any(each.attention_heads for each in own):
            shape = replace(shape, attention="a2a")
        if not any(isinstance(each, ModalOptions) for each in own):
            shape = replace(shape, hyena_li="states")
        if not any(each.expert_count for each in own):
            shape = replace(shape, degrees=replace(shape.degrees, ep=1))
        if not own:  # the embedding, and the head with its loss
            shape = replace(shape, linear="torch")
        return f"{part} {self.config!r} {shape!r}"

    def _fitted(
        self,
        part: str,
        lengths: Sequence[int],
        run: Callable[[FakeModel], Passes],
        hops: bool = False,
    ) -> Passes:
        """Return the passes of a part at the rows and the length that run, from those it has at a
        few of them."""
        rows = self.shape.rows
        numbers = rows_that_run(rows, self.max_rows)

        def of_rows(length: int) -> Passes:
            found = [self._traced(part, each, length, run, hops) for each in numbers]
            return fitted(numbers, found, rows)

        return fitted(lengths, [of_rows(length) for length in lengths], self.shape.seq_len)

    def _traced(
        self, part: str, rows: int, length: int, run: Callable[[FakeModel], Passes], hops: bool
    ) -> Passes:
        cp = self.shape.degrees.cp

        def make() -> Passes:
            if not hops:
                return self._run(rows, length, cp, run)
            short = self._run(rows, length // cp * RING, RING, run)
            if long := lengthened(short, cp - RING):
                return long
            whole = self._run(rows, length, cp, run)
            return Passes(joined(whole.forward), joined(whole.backward))

        key = f"{rows} {length} {part}"
        if key not in _known:
            _known[key] = stored_passes(key, make)
        return _known[key]

    def _run(self, rows: int, length: int, cp: int, run: Callable[[FakeModel], Passes]) -> Passes:
        """Run a part with rows of this length, on so many ranks of the context axis."""
        size = rows, length, cp
        if size not in self.models:
            from .fake.model import FakeModel

            degrees = replace(self.shape.degrees, cp=cp)
            shape = replace(self.shape, rows=rows, seq_len=length, degrees=degrees)
            self.models[size] = FakeModel(self.traced, shape)
        return self.models[size].run(run)


def _sorts(config: ModelConfig, precision: Precision) -> list[str]:
    """Return a name for each layer that layers of its sort share."""
    if precision.fp8 is None:
        return [repr(layer) for layer in config.layers]
    question = f"fp8 matrices {config!r} {precision.fp8!r}"
    narrow = stored(question, partial(_fp8_matrices, config, precision.fp8))
    return [f"{layer!r} {count}" for layer, count in zip(config.layers, narrow, strict=True)]


def _fp8_matrices(config: ModelConfig, fp8: Fp8Config) -> list[int]:
    from .fake.model import fp8_matrices

    return fp8_matrices(config, fp8)
