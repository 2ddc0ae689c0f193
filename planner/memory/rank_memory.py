"""Memory of a rank in any layout of a model: what layers and both ends hold as state, and the
timeline of a step. All of it comes from the events of the engine and from traces; the search adds
up the first, and the second decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import groupby
from typing import NamedTuple, Protocol, TypeVar

from ...models.accounting.level import EngineState, Level, Unit
from ...models.accounting.pieces import ModelPasses
from ...models.accounting.state import Degrees, Shards
from ...models.accounting.step import Timeline
from ...models.config.config import chunk_layers
from ...models.config.options.names import LinearForm
from ...models.config.options.precision import Precision
from ...models.config.options.recompute import Rule
from ...trainer.accounting.memory import step_memory
from ...trainer.accounting.state import ParameterState, build_engine_state
from ...trainer.engines.config import EngineConfig
from ...trainer.engines.shard_groups import LayerShards, layer_of
from ...trainer.engines.traffic import KeptWhole
from ...trainer.layout.config import LayoutConfig
from ...trainer.layout.cuts import Cuts
from ...trainer.layout.stages import chunks_of
from ...trainer.run.config import RunConfig
from ..grid.grid import Grid
from ..grid.split import Split
from .footprints import Footprints, Traces

T = TypeVar("T")
BUFFERS = "buffers"
KindShards = tuple[list[Shards], Shards, Shards, dict[str, Shards]]
"""Local shards of each kind of layer, the embedding, the head with the final norm, and the shared
modules."""


class ModelParts(Protocol):
    """A model, or modules that are not ours, as the memory of its ranks needs it."""

    def traces(self, split: Split, ep: int, linear: LinearForm) -> Traces: ...
    def inputs(self, split: Split) -> int:
        """Return the bytes of the tokens of a micro-batch."""

    def stream(self, split: Split) -> int:
        """Return the bytes of a tensor that a micro-batch passes to another stage."""

    def parameters(self, run: RunConfig, *, whole: bool) -> ParameterState:
        """Return the state of the parameters; not `whole`: of one layer of each kind."""

    def shards_by_kind(self, tp: int, ep: int) -> KindShards: ...
    def shards(self, tp: int, ep: int) -> Shards:
        """Return the local shards of a rank that has all layers."""

    def users(self, chunks: Sequence[range]) -> Mapping[str, set[int]]:
        """Return the chunks that use each module outside the layers, by its path."""

    def tied(self, pp: int) -> bool:
        """Return True if the last stage holds the embedding too."""


class Between(NamedTuple):
    """Bytes of a part of a model on a device, beside the passes."""

    first: int
    """In the first micro-batch: the state."""
    later: int
    """In later ones: gradients too."""
    running: int
    """Bytes that a backward pass adds at its start: whole weights."""

    def held(self, kept: float, *, later: bool) -> float:
        """Return the bytes of the part for the whole step. Where all micro-batches are alive before
        there are gradients, a layer that gives back what it `kept` makes room for its gradients."""
        gradients = self.later - self.first
        return self.first + (gradients if later else max(0.0, gradients - kept))


@dataclass(frozen=True)
class Held:
    """Bytes on a device from one micro-batch to the next. Buffers do not count: they do not add
    up."""

    layers: Sequence[Between]
    """Of a layer of each kind."""
    first: Between
    last: Between
    modules: Sequence[Between]


class Lasting(NamedTuple):
    """Bytes of a part of a model at three moments of a step, without buffers. No more than that
    part adds to the bytes of a rank: buffers and a unit's own moment come on top."""

    ahead: int
    """After a forward pass."""
    between: int
    """After the backward pass of a micro-batch that others follow."""
    end: int
    """After the last backward pass."""
    running: int
    """Bytes that a backward pass adds at its start: whole weights."""


@dataclass(frozen=True)
class LastingParts:
    """`Lasting` of the parts of a model; layers by kind."""

    layers: Sequence[Lasting]
    first: Lasting
    last: Lasting
    modules: Mapping[str, Lasting]


class RankMemory:
    """Memory of the ranks of a model."""

    def __init__(
        self,
        parts: ModelParts,
        run: RunConfig,
        precision: Precision,
        device: str,
        layers: Sequence[int],
    ) -> None:
        """`layers` have the kind of each layer."""
        self.parts, self.run, self.precision, self.device = parts, run, precision, device
        self.footprints = Footprints(parts.traces, layers)
        self.shards_by_kind = cache(parts.shards_by_kind)
        self.shards = cache(parts.shards)
        self.held = remembered(self._held)
        self.whole = remembered(self._whole)
        self.lasting = remembered(self._lasting)

    @cached_property
    def _kinds(self) -> ParameterState:
        """State of one layer of each kind."""
        return self.parts.parameters(self.run, whole=False)

    @cached_property
    def _model(self) -> ParameterState:
        return self.parts.parameters(self.run, whole=True)

    def _state(
        self, engine: EngineConfig, layout: LayoutConfig, parameters: ParameterState
    ) -> EngineState:
        run = replace(self.run, engine=engine, layout=layout)
        return build_engine_state(run, parameters, self.precision, self.device)

    def _held(self, engine: EngineConfig, pp: int, dp: int, cp: int, tp: int, ep: int) -> Held:
        layout = LayoutConfig(pp=pp, tp=tp, cp=cp, ep=ep)
        state = self._state(engine, layout, self._kinds)
        degrees, kept = Degrees(dp=dp, tp=tp, cp=cp, ep=ep), engine.kept_whole(layout)
        return self._held_by_parts(state, degrees, pp, kept)

    def _whole(self, engine: EngineConfig, pp: int, dp: int, cp: int, tp: int, ep: int) -> Held:
        """Return the bytes where all blocks choose that their weights stay whole from the forward
        to the backward pass."""
        layout = LayoutConfig(pp=pp, tp=tp, cp=cp, ep=ep)
        span = LayerShards(layers=(0, len(self.footprints.places)), reshard=False)
        state = self._state(engine.with_layer_shards([span]), layout, self._kinds)
        degrees, kept = Degrees(dp=dp, tp=tp, cp=cp, ep=ep), engine.kept_whole(layout)
        return self._held_by_parts(state, degrees, pp, replace(kept, blocks=True))

    def _held_by_parts(
        self, state: EngineState, degrees: Degrees, pp: int, kept_whole: KeptWhole
    ) -> Held:
        layers, first, last, modules = self.shards_by_kind(degrees.tp, degrees.ep)

        def held(shards: Shards, *, stays: bool = kept_whole.outside) -> Between:
            return _between(state, shards, degrees, self.precision, stays=stays)

        return Held(
            layers=[held(shards, stays=kept_whole.blocks) for shards in layers],
            first=held(first),
            last=held({**last, **first} if self.parts.tied(pp) else last),
            modules=[held(shards) for shards in modules.values()],
        )

    def _lasting(
        self, engine: EngineConfig, pp: int, dp: int, cp: int, tp: int, ep: int
    ) -> LastingParts:
        layout = LayoutConfig(pp=pp, tp=tp, cp=cp, ep=ep)
        # Whole gradients of the parameters on the edges of a rank's part do not add up.
        state = self._state(engine, layout, replace(self._kinds, groups=()))
        kept_whole = engine.kept_whole(layout)
        degrees = Degrees(dp=dp, tp=tp, cp=cp, ep=ep)
        layers, first, last, modules = self.shards_by_kind(tp, ep)

        def lasting(shards: Shards, *, stays: bool = kept_whole.outside) -> Lasting:
            return _lasting_of(state, shards, degrees, self.precision, stays=stays)

        return LastingParts(
            layers=[lasting(shards, stays=kept_whole.blocks) for shards in layers],
            first=lasting(first),
            last=lasting({**last, **first} if self.parts.tied(pp) else last),
            modules={name: lasting(shards) for name, shards in modules.items()},
        )

    def timelines(
        self,
        grid: Grid,
        engine: EngineConfig,
        cuts: Cuts,
        rules: Sequence[Rule],
        sequence: Sequence[bool] = (),
        *,
        every: bool = False,
    ) -> list[Timeline]:
        """Return the memory over a step of a rank of each stage. The engine knows the choices of
        the layers; `sequence` layers use the tensor axis as a part of the context axis. `every`
        micro-batch is in the timelines, or as many as the highest level needs.
        """
        layout, shape = grid.layout, grid.shape
        split, ep = shape.split, layout.ep
        passes = self.footprints.traces(split, ep, engine.linear).whole(rules)
        shards = self.shards(split.tp, ep)
        if any(sequence):
            context = self.footprints.traces(as_context(split), ep, engine.linear).whole(rules)
            layers = zip(passes.layers, context.layers, sequence, strict=True)
            passes = replace(
                passes,
                layers=[
                    in_context if is_context else plain for plain, in_context, is_context in layers
                ],
            )
            shards = dict(shards)
            for name, shard in self.shards(1, ep).items():
                layer = layer_of(name)
                if layer is not None and sequence[layer]:
                    shards[name] = shard
        return [
            self.stage_timeline(grid, engine, passes, shards, cuts, stage, every=every)
            for stage in range(layout.pp)
        ]

    def stage_timeline(
        self,
        grid: Grid,
        engine: EngineConfig,
        passes: ModelPasses,
        shards: Shards,
        cuts: Cuts,
        stage: int,
        *,
        every: bool = False,
    ) -> Timeline:
        """Return the memory over a step of a rank of a stage, from the passes of all layers and
        the shards of a rank that has all of them."""
        layout, shape = grid.layout, grid.shape
        stage_shards = self._shards_of_stage(shards, cuts, layout, stage, len(passes.layers))
        degrees = Degrees(dp=shape.dp, tp=layout.tp, cp=layout.cp, ep=layout.ep)
        return step_memory(
            passes,
            self._state(engine, layout, self._model).memory(stage_shards, degrees),
            layout,
            cuts,
            stage,
            shape.micro_batches,
            self.parts.inputs(shape.split),
            self.parts.stream(shape.split),
            every=every,
        )

    def _shards_of_stage(
        self, shards: Shards, cuts: Cuts, layout: LayoutConfig, stage: int, layers: int
    ) -> Shards:
        """Return the shards of a rank of a stage."""
        if layout.pp == 1:
            return shards
        chunks, stage_chunks = chunk_layers(layers, cuts), set(chunks_of(layout, stage))
        numbers: set[Unit] = {number for chunk in stage_chunks for number in chunks[chunk]}
        users_of_module = self.parts.users(chunks).items()
        paths = tuple(f"{path}." for path, users in users_of_module if users & stage_chunks)
        return {
            name: shard
            for name, shard in shards.items()
            if layer_of(name) in numbers or name.startswith(paths)
        }


def apply_layer_choices(
    engine: EngineConfig, choices: Sequence[tuple[bool | None, bool]], ranks: int
) -> EngineConfig:
    """Return the engine with the choices of the layers: reshard, and whether they use the tensor
    axis as a context axis. All `ranks` of a stage share the state of such a layer; they always do
    in an engine whose layers do not choose."""
    spans, first = [], 0
    for (reshard, sequence), alike in groupby(choices):
        end = first + len(list(alike))
        if reshard is False or (sequence and engine.chooses_layers):
            span = LayerShards(
                layers=(first, end - 1),
                reshard=reshard is not False,
                shard=ranks if sequence else None,
            )
            spans.append(span)
        first = end
    return engine.with_layer_shards(spans) if spans else engine


def as_context(split: Split) -> Split:
    """Return the split with the tensor axis as a part of the context axis."""
    return replace(split, tp=1, cp=split.cp * split.tp)


def _between(
    state: EngineState, shards: Shards, degrees: Degrees, precision: Precision, *, stays: bool
) -> Between:
    """Run the events of two micro-batches for one part of a model. `stays`: whole weights stay from
    the forward to the backward pass."""
    if not shards:
        return Between(0, 0, 0)
    level, engine = Level(), state.memory(shards, degrees)
    layer = layer_of(next(iter(shards)))
    units: list[Unit] = [None] if layer is None else [None, layer]
    moments = []
    running = 0
    engine.begin(level)
    for _ in range(2):
        between = _lasting(level)
        for unit in units:
            engine.enter(level, unit, backward=False)
        for unit in reversed(units):
            engine.leave(level, unit, backward=False)
        moments.append(_lasting(level) if stays else between)
        before = level.total
        for unit in units:
            engine.enter(level, unit, backward=True)
        running = level.total - before
        for name, shard in shards.items():
            size = math.prod(shard.local) * precision.weight_bytes
            engine.gradient(level, name, size, last=False)
        for unit in reversed(units):
            engine.leave(level, unit, backward=True)
        engine.end_backward(level, last=False)
    first, later = moments
    return Between(first, later, running)


def _lasting_of(
    state: EngineState, shards: Shards, degrees: Degrees, precision: Precision, *, stays: bool
) -> Lasting:
    """Run the events of two micro-batches for one part of a model. `stays`: whole weights stay from
    the forward to the backward pass."""
    if not shards:
        return Lasting(0, 0, 0, 0)
    level, engine = Level(), state.memory(shards, degrees)
    layer = layer_of(next(iter(shards)))
    units: list[Unit] = [None] if layer is None else [None, layer]
    engine.begin(level)
    moments, running = [_lasting(level)], 0
    for last in (False, True):
        for unit in units:
            engine.enter(level, unit, backward=False)
        for unit in reversed(units):
            engine.leave(level, unit, backward=False)
        if stays and not last:
            moments = [_lasting(level)]
        before = level.total
        for unit in units:
            engine.enter(level, unit, backward=True)
        running = running if last else level.total - before
        for name, shard in shards.items():
            size = math.prod(shard.local) * precision.weight_bytes
            engine.gradient(level, name, size, last=last)
        for unit in reversed(units):
            engine.leave(level, unit, backward=True)
        engine.end_backward(level, last=last)
        moments.append(_lasting(level))
    ahead, between, end = moments
    return Lasting(ahead, between, end, running)


def _lasting(level: Level) -> int:
    return level.total - level.parts.get(BUFFERS, 0)


def remembered(
    function: Callable[[EngineConfig, int, int, int, int, int], T],
) -> Callable[[EngineConfig, int, int, int, int, int], T]:
    """Return the function with a memory. Engines with options of torch.compile have no hash: the
    key is the object, which the memory keeps alive."""
    known: dict[tuple[int, ...], tuple[EngineConfig, T]] = {}

    def call(engine: EngineConfig, *degrees: int) -> T:
        key = id(engine), *degrees
        if key not in known:
            known[key] = engine, function(engine, *degrees)
        return known[key][1]

    return call
