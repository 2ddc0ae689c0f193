"""A rank's memory in any layout: the timeline of a step, and samples that add up.

The timeline (models/accounting/step.py) joins the traced passes with the engine's events. Its peak
decides whether a plan fits. The search adds up samples instead: state by part (part_memory.py),
activations by layer (footprints.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache, cached_property
from itertools import groupby
from typing import Concatenate, ParamSpec, TypeVar

from ...models.accounting.level import EngineState, Unit
from ...models.accounting.pieces import ModelPasses
from ...models.accounting.state import Degrees, Shards
from ...models.accounting.step import Timeline
from ...models.config.config import chunk_layers
from ...models.config.options.precision import Precision
from ...models.config.options.recompute import Rule
from ...trainer.accounting.memory import step_memory
from ...trainer.accounting.state import ParameterState, build_engine_state
from ...trainer.engines.config import EngineConfig
from ...trainer.engines.shard_groups import LayerShards, parse_layer_number
from ...trainer.layout.config import LayoutConfig
from ...trainer.layout.cuts import Cuts
from ...trainer.layout.stages import list_chunks
from ...trainer.run.config import RunConfig
from ..grid.grid import Grid
from .footprints import Footprints
from .part_memory import PartMemory, sample_part
from .parts import ModelParts, PartTable

T = TypeVar("T")
P = ParamSpec("P")


class RankMemory:
    """Computes what the ranks of a model allocate."""

    def __init__(
        self,
        parts: ModelParts,
        run: RunConfig,
        precision: Precision,
        device: str,
        layers: Sequence[int],
    ) -> None:
        """`layers` has the kind by layer."""
        self.parts, self.run, self.precision, self.device = parts, run, precision, device
        self.footprints = Footprints(parts.traces, layers)
        self.shards_by_part = cache(parts.shards_by_part)
        self.shards = cache(parts.shards)
        self.sample_parts = memoize_by_engine(self._sample_parts)

    @cached_property
    def _kind_parameters(self) -> ParameterState:
        return self.parts.parameters(self.run, by_kind=True)

    @cached_property
    def _parameters(self) -> ParameterState:
        return self.parts.parameters(self.run, by_kind=False)

    def _state(
        self, engine: EngineConfig, layout: LayoutConfig, parameters: ParameterState, dp: int
    ) -> EngineState:
        run = replace(self.run, engine=engine, layout=layout)
        return build_engine_state(run, parameters, self.precision, self.device, dp * layout.cp)

    def _sample_parts(
        self,
        engine: EngineConfig,
        pp: int,
        degrees: Degrees,
        *,
        unsharded_blocks: bool = False,
        edges: bool = True,
    ) -> PartTable[PartMemory]:
        """Sample every part.

        With `unsharded_blocks`, all blocks keep gathered weights from the forward to the backward
        pass. Without `edges`, parameters on the edges of a rank's shard have no whole gradients,
        because these do not add up over parts.
        """
        layout = LayoutConfig(pp=pp, tp=degrees.tp, cp=degrees.cp, ep=degrees.ep)
        ranks, parameters = degrees.dp * degrees.cp, self._kind_parameters
        unsharded = engine.for_ranks(ranks).unsharded_weights(layout)
        if unsharded_blocks:
            span = LayerShards(layers=(0, len(self.footprints.kind_layers)), reshard=False)
            engine = engine.replace_layer_shards([span])
            unsharded = replace(unsharded, blocks=True)
        if not edges:
            parameters = replace(parameters, groups=())
        state = self._state(engine, layout, parameters, degrees.dp)
        weight_bytes = self.precision.weight_bytes
        return self.shards_by_part(pp, degrees.tp, degrees.ep).map(
            lambda shards: sample_part(state, shards, degrees, unsharded, weight_bytes)
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
        """Return a rank's memory over a step, by stage.

        `engine` has the layers' choices. `sequence` layers use the tensor axis as part of the
        context axis. The timelines have `every` micro-batch, or as many as the peak needs.
        """
        layout, split = grid.layout, grid.shape.split
        passes = self.footprints.traces(split, layout.ep, engine.linear).trace_model(rules)
        shards = self.shards(split.tp, layout.ep)
        if any(sequence):
            traces = self.footprints.traces(split.context_only, layout.ep, engine.linear)
            context_passes = traces.trace_model(rules)
            layers = [
                context_layer if is_sequence else layer
                for layer, context_layer, is_sequence in zip(
                    passes.layers, context_passes.layers, sequence, strict=True
                )
            ]
            passes = replace(passes, layers=layers)
            whole_shards = self.shards(1, layout.ep)
            shards = {
                name: whole_shards[name]
                if (number := parse_layer_number(name)) is not None and sequence[number]
                else shard
                for name, shard in shards.items()
            }
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
        """Return the memory over a step on a rank in this stage.

        `passes` and `shards` have all layers, also those in other stages.
        """
        layout, shape = grid.layout, grid.shape
        stage_shards = self._select_stage_shards(shards, cuts, layout, stage, len(passes.layers))
        state = self._state(engine, layout, self._parameters, shape.dp)
        return step_memory(
            passes,
            state.memory(stage_shards, grid.degrees),
            layout,
            cuts,
            stage,
            shape.micro_batches,
            self.parts.input_bytes(shape.split),
            self.parts.stream_bytes(shape.split),
            every=every,
        )

    def _select_stage_shards(
        self, shards: Shards, cuts: Cuts, layout: LayoutConfig, stage: int, num_layers: int
    ) -> Shards:
        if layout.pp == 1:
            return shards
        chunks, stage_chunks = chunk_layers(num_layers, cuts), set(list_chunks(layout, stage))
        stage_layers: set[Unit] = {layer for chunk in stage_chunks for layer in chunks[chunk]}
        users_by_path = self.parts.users(chunks).items()
        paths = tuple(f"{path}." for path, users in users_by_path if users & stage_chunks)
        return {
            name: shard
            for name, shard in shards.items()
            if parse_layer_number(name) in stage_layers or name.startswith(paths)
        }


def apply_layer_choices(
    engine: EngineConfig, choices: Sequence[tuple[bool | None, bool]], ranks: int
) -> EngineConfig:
    """Return the engine with the layers' choices, (reshard, sequence) by layer.

    A sequence layer uses the tensor axis as a context axis, so all `ranks` in its stage shard its
    state. Where an engine's layers do not choose, they always do.
    """
    spans, first = [], 0
    for (reshard, sequence), equal_choices in groupby(choices):
        end = first + len(list(equal_choices))
        if reshard is False or (sequence and engine.chooses_layers):
            span = LayerShards(
                layers=(first, end - 1),
                reshard=reshard is not False,
                shard=ranks if sequence else None,
            )
            spans.append(span)
        first = end
    return engine.replace_layer_shards(spans) if spans else engine


def memoize_by_engine(
    function: Callable[Concatenate[EngineConfig, P], T],
) -> Callable[Concatenate[EngineConfig, P], T]:
    """Return the function with a cache.

    Engines with torch.compile options have no hash. So the key is the engine's identity, and the
    cache keeps the engine alive.
    """
    results: dict[Hashable, tuple[EngineConfig, T]] = {}

    def call(engine: EngineConfig, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = id(engine), args, tuple(kwargs.items())
        if key not in results:
            results[key] = engine, function(engine, *args, **kwargs)
        return results[key][1]

    return call
