"""Memory over a forward and a backward pass: a model's embedding, layers and loss.

A single layer per kind runs forward and backward on fake tensors (fake/), with a rank's rows,
shards and recompute rule. Equal layers share a trace. A process traces each model, shape and rule
once.

Cached traces are read without torch; only missing ones run.
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
from .extrapolate import fit_passes
from .hops import LONG, RING, join_segments, lengthen_ring
from .layer_kinds import reduce_to_kinds
from .pieces import EMBEDDINGS, ModelPasses, Passes
from .shape import Shape
from .stored import load_or_compute, load_or_compute_passes

if TYPE_CHECKING:
    from .fake.model import FakeModel

MAX_LENGTH = 4096
"""Maximal row length that runs where operators walk through rows in steps. Longer rows are
extrapolated from two shorter ones, or from three where masks grow quadratically. The shorter rows
are long enough to peak at the same moment: with very short rows, a weight gradient would be the
peak."""
MAX_ROWS = 64
"""Maximal number of rows that run. Larger micro-batches are extrapolated from two row counts, large
for the same reason."""

_traced_passes: dict[str, Passes] = {}


def model_passes(config: ModelConfig, shape: Shape, rules: Sequence[Rule]) -> ModelPasses:
    """Trace a model with a recompute rule per layer."""
    return Tracer(config, shape).trace_model(rules)


def _problems(config: ModelConfig, shape: Shape) -> Iterator[str]:
    """Yield the reasons why the ranks cannot divide the rows. A run has checked them already."""
    tp, cp = shape.degrees.tp, shape.degrees.cp
    if shape.seq_len % (tp * cp):
        yield f"rows of {shape.seq_len:,} tokens do not divide by tp × cp = {tp * cp}"
    for name, options in config.operators.items():
        heads = options.attention_heads
        states = options.state_heads
        for form, number in ((shape.attention, heads), (shape.delta, states if cp > 1 else None)):
            if form == "a2a" and number and number % (tp * cp):
                yield f"operators.{name}: tp={tp} × cp={cp} does not divide its {number} heads"


def rename_gradients(passes: Passes, prefixes: Mapping[str, str]) -> Passes:
    """Replace a layer's parameter prefixes (`shared.` or none) by the model's."""

    def rename(local_name: str) -> str:
        if not local_name or local_name == EMBEDDINGS:
            return local_name
        if local_name.startswith("shared."):
            return prefixes["shared."] + local_name.removeprefix("shared.")
        return prefixes[""] + local_name

    return Passes(
        passes.forward,
        tuple(replace(segment, gradient=rename(segment.gradient)) for segment in passes.backward),
    )


def choose_traced_rows(rows: int, max_rows: int = MAX_ROWS) -> list[int]:
    """Return the row counts to trace; larger row counts are extrapolated from them."""
    return [rows] if rows <= max_rows else [max_rows - 1, max_rows]


class Tracer:
    """Traces a model's parts, and extrapolates to row counts and lengths that do not run."""

    def __init__(
        self,
        config: ModelConfig,
        shape: Shape,
        *,
        max_rows: int = MAX_ROWS,
        max_length: int = MAX_LENGTH,
        max_ring: int = LONG,
    ) -> None:
        """Extrapolate above `max_rows` rows, `max_length` tokens and `max_ring` ranks."""
        if problems := list(_problems(config, shape)):
            raise LayoutError(
                "\n  ".join(["the layout does not divide the model's rows", *problems])
            )
        shape = replace(shape, degrees=replace(shape.degrees, dp=1))  # it divides no micro-batch
        self.config, self.shape = config, shape
        self.max_rows, self.max_length, self.max_ring = max_rows, max_length, max_ring
        self.kinds = _layer_kinds(config, shape.precision)
        self.traced = config
        """The model that runs, with a layer per kind."""
        self.kind_indices = {kind: self.kinds.index(kind) for kind in self.kinds}
        if shape.precision.fp8 is None:  # whether a product is in FP8 depends on the layer
            self.traced = reduce_to_kinds(config)
            self.kind_indices = {kind: index for index, kind in enumerate(self.kind_indices)}
        self.models: dict[tuple[int, int, int], FakeModel] = {}
        self.trace_kind, self.named = cache(self._trace_kind), cache(self._trace_named)
        self.first, self.last = cache(self._first), cache(self._last)

    def trace_model(self, rules: Sequence[Rule]) -> ModelPasses:
        """Return the model's passes with a recompute rule per layer."""
        numbers = range(len(self.config.layers))
        layers = [self.named(*pair) for pair in zip(numbers, rules, strict=True)]
        return ModelPasses(self.first(), layers, self.last(), list(map(str, self.config.layers)))

    def _trace_named(self, number: int, rule: Rule) -> Passes:
        """Return a layer's passes, with the model's parameter names."""
        shared = self.config.layers[number].shared
        prefixes = {"": f"blocks.{number}.", "shared.": f"shared.{shared}."}
        return rename_gradients(self.layer(number, rule), prefixes)

    def layer(self, number: int, rule: Rule) -> Passes:
        """Return a layer's passes, with the layer's parameter names."""
        return self.trace_kind(self.kinds[number], rule)

    def _trace_kind(self, kind: str, rule: Rule) -> Passes:
        first, index = self.kinds.index(kind), self.kind_indices[kind]
        operators = self.config.layers[first].names
        key, hops = self._key(f"{first} {rule!r}", operators), self._is_long_ring(operators)
        lengths = self._lengths(operators)
        return self._extrapolate(
            key, lengths, lambda model: model.layer(index, rule, hops=hops), hops
        )

    def _first(self) -> Passes:
        return self._extrapolate(self._key("first"), self._lengths(), lambda model: model.first())

    def _last(self) -> Passes:
        return self._extrapolate(self._key("last"), self._lengths(), lambda model: model.last())

    def _lengths(self, operators: Sequence[str] = ()) -> list[int]:
        """Return the lengths at which a part runs: the sequence length itself, if no operator needs
        more operations for longer rows."""
        shape, options = self.shape, [self.config.operators[name] for name in operators]
        attends = any(operator.attention_heads for operator in options)
        max_length = self.max_length
        ring = attends and shape.attention == "ring" and shape.device != "cuda"
        if ring:  # with two tiles in each chunk; scores of fewer grow with the square of the length
            max_length = max(max_length, 4 * shape.degrees.cp * TILE)
        if shape.seq_len <= max_length or not (
            ring or any(operator.steps(shape.device) for operator in options)
        ):
            return [shape.seq_len]
        max_length += -max_length % (2 * shape.degrees.tp * shape.degrees.cp)
        masks = any(getattr(operator, "window", None) for operator in options)
        return [max_length // 2, max_length, *([2 * max_length] if masks else [])]

    def _is_long_ring(self, operators: Sequence[str]) -> bool:
        """True for a layer with a long ring, whose operators all work on row chunks."""
        options = [self.config.operators[name] for name in operators]
        divisible = all(operator.tokenwise or operator.attention_heads for operator in options)
        windows = any(getattr(operator, "window", None) for operator in options)
        ring = self.shape.attention == "ring" and any(
            operator.attention_heads for operator in options
        )
        return ring and divisible and not windows and self.shape.degrees.cp > self.max_ring

    def _key(self, label: str, operators: Sequence[str] = ()) -> str:
        """Return a part's cache key, without shape fields that its operators ignore: layouts that
        differ only in those share traces."""
        options = [self.config.operators[name] for name in operators]
        shape = replace(self.shape, rows=1, seq_len=1)
        if not any(operator.attention_heads for operator in options):
            shape = replace(shape, attention="a2a")
        if not any(isinstance(operator, ModalOptions) for operator in options):
            shape = replace(shape, hyena_li="states")
        if not any(operator.state_heads for operator in options):
            shape = replace(shape, delta="states")
        if not any(operator.expert_count for operator in options):
            shape = replace(shape, degrees=replace(shape.degrees, ep=1))
        if not options:  # the embedding, and the head with its loss
            shape = replace(shape, linear="torch")
        return f"{label} {self.config!r} {shape!r}"

    def _extrapolate(
        self,
        part_key: str,
        lengths: Sequence[int],
        run: Callable[[FakeModel], Passes],
        hops: bool = False,
    ) -> Passes:
        """Trace a part at a few row counts and lengths, and extrapolate to the shape's."""
        rows = self.shape.rows
        traced_rows = choose_traced_rows(rows, self.max_rows)

        def extrapolate_rows(length: int) -> Passes:
            samples = [
                self._trace(part_key, num_rows, length, run, hops) for num_rows in traced_rows
            ]
            return fit_passes(traced_rows, samples, rows)

        return fit_passes(
            lengths, [extrapolate_rows(length) for length in lengths], self.shape.seq_len
        )

    def _trace(
        self, part_key: str, rows: int, length: int, run: Callable[[FakeModel], Passes], hops: bool
    ) -> Passes:
        cp = self.shape.degrees.cp

        def compute() -> Passes:
            if not hops:
                return self._run_part(rows, length, cp, run)
            short = self._run_part(rows, length // cp * RING, RING, run)
            if long := lengthen_ring(short, cp - RING):
                return long
            full = self._run_part(rows, length, cp, run)
            return Passes(join_segments(full.forward), join_segments(full.backward))

        key = f"{rows} {length} {part_key}"
        if key not in _traced_passes:
            _traced_passes[key] = load_or_compute_passes(key, compute)
        return _traced_passes[key]

    def _run_part(
        self, rows: int, length: int, cp: int, run: Callable[[FakeModel], Passes]
    ) -> Passes:
        """Run a part with rows of `length` tokens on `cp` ranks."""
        size = rows, length, cp
        if size not in self.models:
            from .fake.model import FakeModel

            degrees = replace(self.shape.degrees, cp=cp)
            shape = replace(self.shape, rows=rows, seq_len=length, degrees=degrees)
            self.models[size] = FakeModel(self.traced, shape)
        return self.models[size].run(run)


def _layer_kinds(config: ModelConfig, precision: Precision) -> list[str]:
    """Return a name per layer, equal for equal layers."""
    if precision.fp8 is None:
        return [repr(layer) for layer in config.layers]
    question = f"fp8 matrices {config!r} {precision.fp8!r}"
    num_matrices = load_or_compute(question, partial(_fp8_matrices, config, precision.fp8))
    return [f"{layer!r} {count}" for layer, count in zip(config.layers, num_matrices, strict=True)]


def _fp8_matrices(config: ModelConfig, fp8: Fp8Config) -> list[int]:
    from .fake.model import fp8_matrices

    return fp8_matrices(config, fp8)
