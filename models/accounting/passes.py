"""Memory of the parts of a model: each sort of layer, the embedding, and the loss, traced once.

One layer of each sort runs forward and backward on fake tensors (trace.py), with the rows, the
shards and the recompute rule of one rank. Layers that are alike share a trace; a process traces
each model, shape and rule once.

On a GPU the fused kernels run where `kernel: auto` chooses them. On the CPU rows have documents, as
in training. Split experts run as if this rank had them alone: each gets an equal part of the rows,
and the buffers of the exchange are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ...console.errors import LayoutError
from ..config import ModelConfig
from ..documents import Aligned, Buckets, Documents, Spans
from ..fp8 import quantize
from ..kernels.choice import as_on_gpu
from ..layers.ring_flash import calls_of_rows
from ..model import Model
from ..operators import OPERATORS, BatchContext
from ..options.hyena import ModalOptions
from ..options.names import AttentionForm, LongFilterForm
from ..options.precision import Precision
from ..options.recompute import Rule
from ..parallel.axes import Axes, Axis
from ..precision import compute_dtype
from .count import build_meta
from .extrapolate import fitted
from .hops import LONG, RING, joined, lengthened
from .sorts import one_of_each
from .state import Degrees
from .stored import stored
from .trace import Passes, fake_tensors, new_mode, trace

T = TypeVar("T")

LONGEST = 512
"""Tokens of the longest row that runs where plain operators do, in many small steps. Longer rows
are extrapolated from shorter ones: from two, or from three where masks grow with the square."""
MOST_ROWS = 3
"""Most rows that run; the bytes of more rows are extrapolated from two numbers of rows."""
EMBEDDINGS = "embeddings"
"""Name of the embeddings among the parameters of a layer that calls a shared block: their gradient
is the sum of those of all calls."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Rows, precision, device and layout of one rank's micro-batch."""

    rows: int
    """Rows of a micro-batch; the ranks of tp and cp have parts of them."""
    seq_len: int
    precision: Precision
    device: str
    degrees: Degrees = field(default_factory=Degrees)
    attention: AttentionForm = "a2a"
    hyena_li: LongFilterForm = "states"


@dataclass(frozen=True)
class ModelPasses:
    """Passes of all parts of a model. Gradients have the parameters' logical names."""

    first: Passes
    """The embedding."""
    layers: Sequence[Passes]
    last: Passes
    """Final norm, logits and loss."""
    names: Sequence[str]
    """Sort of each layer, for people."""


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


class Tracer:
    """Traces the parts of a model at the lengths and rows that run."""

    def __init__(self, config: ModelConfig, shape: Shape) -> None:
        if wrong := list(_problems(config, shape)):
            raise LayoutError("\n  ".join(["the layout does not divide the model's rows", *wrong]))
        shape = replace(shape, degrees=replace(shape.degrees, dp=1))  # it divides no micro-batch
        self.config, self.shape = config, shape
        self.sorts = _sorts(config, shape.precision)
        self.traced = config
        """The model that runs, with a layer of each sort."""
        self.places = {sort: self.sorts.index(sort) for sort in self.sorts}
        if shape.precision.fp8 is None:  # whether a product is in FP8 depends on the layer
            self.traced = one_of_each(config)
            self.places = {sort: place for place, sort in enumerate(self.places)}
        self.models: dict[tuple[int, int, int], _Model] = {}
        self.parts: dict[str, Passes] = {}

    def whole(self, rules: Sequence[Rule]) -> ModelPasses:
        """Return the passes of the model with a recompute rule for each layer."""
        layers = []
        for number, (layer, rule) in enumerate(zip(self.config.layers, rules, strict=True)):
            own = {"": f"blocks.{number}.", "shared.": f"shared.{layer.shared}."}
            layers.append(renamed(self.layer(number, rule), own))
        return ModelPasses(self.first(), layers, self.last(), list(map(str, self.config.layers)))

    def layer(self, number: int, rule: Rule) -> Passes:
        """Return the passes of a layer, under names of the layer's own parameters."""
        sort = self.sorts[number]
        first, place = self.sorts.index(sort), self.places[sort]
        names = self.config.layers[number].names
        part, hops = self._key(f"{first} {rule!r}", names), self._is_long_ring(names)
        return self._extrapolated(part, lambda model: model.layer(place, rule, hops=hops), hops)

    def first(self) -> Passes:
        return self._extrapolated(self._key("first"), _Model.first)

    def last(self) -> Passes:
        return self._extrapolated(self._key("last"), _Model.last)

    def _is_long_ring(self, operators: Sequence[str]) -> bool:
        """True for a layer with a long ring that has nothing but parts of rows."""
        own = [self.config.operators[name] for name in operators]
        parts = all(OPERATORS[each.kind].tokenwise or each.attention_heads for each in own)
        windows = any(getattr(each, "window", None) for each in own)
        ring = self.shape.attention == "ring" and any(each.attention_heads for each in own)
        return ring and parts and not windows and self.shape.degrees.cp > LONG

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
        return f"{part} {self.config!r} {shape!r}"

    def _extrapolated(
        self, part: str, run: Callable[[_Model], Passes], hops: bool = False
    ) -> Passes:
        if part not in self.parts:
            self.parts[part] = self._fitted(part, run, hops)
        return self.parts[part]

    def _fitted(self, part: str, run: Callable[[_Model], Passes], hops: bool) -> Passes:
        shape = self.shape
        lengths = [shape.seq_len]
        operators = self.config.operators.values()
        steps = shape.device != "cuda" or any(each.steps_on_gpus for each in operators)
        if shape.seq_len > LONGEST and steps:
            masks = any(getattr(each, "window", None) for each in operators)
            lengths = [*([LONGEST // 4] if masks else []), LONGEST // 2, LONGEST]
        numbers = [shape.rows] if shape.rows <= MOST_ROWS else [MOST_ROWS - 1, MOST_ROWS]

        def of_rows(length: int) -> Passes:
            found = [self._traced(part, rows, length, run, hops) for rows in numbers]
            return fitted(numbers, found, shape.rows)

        return fitted(lengths, [of_rows(length) for length in lengths], shape.seq_len)

    def _traced(
        self, part: str, rows: int, length: int, run: Callable[[_Model], Passes], hops: bool
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
            _known[key] = stored(key, make)
        return _known[key]

    def _run(self, rows: int, length: int, cp: int, run: Callable[[_Model], Passes]) -> Passes:
        """Run a part with rows of this length, on so many ranks of the context axis."""
        size = rows, length, cp
        if size not in self.models:
            degrees = replace(self.shape.degrees, cp=cp)
            shape = replace(self.shape, rows=rows, seq_len=length, degrees=degrees)
            self.models[size] = _Model(self.traced, shape)
        return self.models[size].run(run)


def _sorts(config: ModelConfig, precision: Precision) -> list[str]:
    """Return a name for each layer that layers of its sort share."""
    if precision.fp8 is None:
        return [repr(layer) for layer in config.layers]
    model = quantize(build_meta(config), precision.fp8)
    narrow = (
        sum(getattr(module, "fp8", False) for module in block.modules())
        for block in model.typed_blocks()
    )
    return [f"{layer!r} {count}" for layer, count in zip(config.layers, narrow, strict=True)]


class _Documents(Documents):
    """Documents whose layouts are real tensors: their sizes depend on the numbers."""

    def lengthened(self, before: int) -> Documents:
        with _disable_current_modes():
            return _Documents(super().lengthened(before).positions)

    def buckets(self) -> Buckets:
        with _disable_current_modes():
            return super().buckets()

    def aligned(self, chunk: int, *, compiled: bool = False) -> Aligned:
        with _disable_current_modes():
            return super().aligned(chunk, compiled=compiled)

    def spans(self, *, compiled: bool = False) -> Spans:
        with _disable_current_modes():
            return super().spans(compiled=compiled)

    def kept(self, key: Hashable, build: Callable[[Documents], T]) -> T:
        with _disable_current_modes():
            return super().kept(key, build)


class _Model:
    """A model of fake tensors, and a micro-batch."""

    def __init__(self, config: ModelConfig, shape: Shape) -> None:
        degrees = shape.degrees
        self.shape, self.mode = shape, new_mode()
        self.config = _with_own_experts(config, degrees.ep)
        self.axes = Axes(
            tensor=Axis(None, degrees.tp - 1, degrees.tp),
            context=Axis(None, degrees.cp - 1, degrees.cp),  # it has all states before its part
            attention=shape.attention,
            hyena_li=shape.hyena_li,
        )
        self.documents = self._documents()
        self.model = self._build()

    @contextmanager
    def _fake_tensors(self) -> Iterator[None]:
        """Make tensors fake inside, on the device of the shape."""
        kernels = as_on_gpu() if self.shape.device == "cuda" else nullcontext()
        with kernels, fake_tensors(compute_dtype(self.shape.precision), self.mode):
            yield

    def _build(self) -> Model:
        with self._fake_tensors():
            model = quantize(Model(self.config), self.shape.precision.fp8)
            model.shard(self.axes)
            fp32 = model.full_precision(self.shape.precision)
            for name, parameter in model.named_parameters():
                if name in fp32:
                    parameter.data = parameter.data.float()
        return model

    def _documents(self) -> Documents | None:
        """Return rows of one document each; None where a GPU needs none."""
        shape, axis = self.shape, self.axes.context
        if shape.device == "cuda":
            return None
        rows, length = shape.rows, shape.seq_len
        ends = torch.arange(0, rows * length + 1, length)
        whole = _Documents(Documents.from_cu_seqlens(ends, (rows, length)).positions)
        if axis.size == 1:
            return whole
        return _Documents(whole.positions[:, axis.part(length)], whole)

    def run(self, part: Callable[[_Model], Passes]) -> Passes:
        with self._fake_tensors():
            return part(self)

    def _batch(self, embeddings: Tensor | None = None) -> BatchContext:
        length = self.shape.seq_len // self.axes.context.size
        if self.documents is None:
            positions = torch.arange(length).unsqueeze(0)
        else:
            positions = self.documents.positions
        return BatchContext(positions, self.documents, embeddings=embeddings, axes=self.axes)

    def _stream(self) -> Tensor:
        length = self.shape.seq_len // self.axes.context.size // self.axes.tensor.size
        return torch.empty(self.shape.rows, length, self.config.width)

    def _tokens(self) -> Tensor:
        length = self.shape.seq_len // self.axes.context.size
        return torch.zeros(self.shape.rows, length, dtype=torch.int64)

    def layer(self, number: int, rule: Rule, *, hops: bool = False) -> Passes:
        block = self.model.typed_blocks()[number]
        shared = self.model.shared_block(block.layer)
        block.set_recompute(rule)
        leaves = _leaves(block)
        embeddings = None
        if shared is not None:
            embeddings = self._stream().requires_grad_()
            leaves |= {f"shared.{name}": leaf for name, leaf in _leaves(shared).items()}
            leaves[EMBEDDINGS] = embeddings
        batch = self._batch(embeddings)
        self._make_ring()

        def run(u: Tensor) -> Tensor:
            result: Tensor = block(u, batch, None, shared)[0]
            return result

        passes = trace(run, self._stream, leaves, hops=hops)
        block.set_recompute("none")
        return passes

    def _make_ring(self) -> None:
        """Make the tables of a ring, which all of its calls share: they are not the layer's."""
        part, axis = self._tokens(), self.axes.context
        if axis.size > 1 and self.axes.attention == "ring" and self.documents is None:
            calls_of_rows.cache_clear()  # those of another model are fake tensors of its mode
            calls_of_rows(*part.shape, axis, part.device)

    def first(self) -> Passes:
        tokens, batch = self._tokens(), self._batch()
        model = self.model
        leaves = _within(model, ("embedding.", "positions."))
        return trace(lambda ids: model.embed(ids, batch), lambda: tokens, leaves)

    def last(self) -> Passes:
        model, targets = self.model, self._tokens()
        weights = torch.ones(targets.shape, dtype=torch.float32)
        leaves = _within(model, ("embedding.", "norm.", "head."))
        return trace(lambda u: model.loss(model.norm(u), targets, weights)[0], self._stream, leaves)


def _leaves(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters())


def _within(model: Model, roots: tuple[str, ...]) -> dict[str, Tensor]:
    return {name: leaf for name, leaf in model.named_parameters() if name.startswith(roots)}


def _with_own_experts(config: ModelConfig, ep: int) -> ModelConfig:
    """Return the model with the experts of one rank."""
    if ep == 1:
        return config
    operators = dict(config.operators)
    for name, options in operators.items():
        if options.expert_count is not None:
            own = max(options.expert_count // ep, getattr(options, "top_k", 1))
            operators[name] = replace(options, experts=own)  # type: ignore[call-arg]
    return replace(config, operators=operators)
