"""Costs of the layers of a model in a layout: the problem that the search solves.

Times follow from the trace of a layer and the figures of the hardware. Bytes of layers and of the
state add up (footprints.py); what does not is counted by the timeline of a step (`timelines`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ...models.accounting.state import Degrees
from ...models.accounting.step import Timeline
from ...models.config.options.names import LinearForm
from ...models.config.options.precision import PRECISIONS, Precision
from ...models.config.options.recompute import Rule, Selective
from ...trainer.engines.config import EngineConfig
from ...trainer.layout.checks import problems
from ...trainer.layout.config import LayoutConfig
from ...trainer.layout.cuts import Cuts
from ...trainer.run.config import RunConfig
from ..division.problem import Choice, FixedCosts, LayerKind, Problem
from ..grid.grid import Grid, LayoutShape, enumerate_grids
from ..grid.split import Split
from ..memory.footprints import Footprint, pareto_front
from ..memory.model_parts import ConfigParts
from ..memory.part_memory import PartMemory
from ..memory.parts import ModelParts, PartTable
from ..memory.rank_memory import RankMemory, apply_layer_choices, memoize_by_engine
from ..traces.ring import Operations
from ..traces.trace import LayerTrace, ModelTrace, trace_model
from ..traces.work import RULES, PassTimes, recompute_launches
from . import messages
from .forms import Form, Sizes, Way, choices
from .machine import Machine
from .rings import compute_rings, split_operations

if TYPE_CHECKING:
    from ...dataplane.order.timeline import PhaseRows
    from ...models.config.config import ModelConfig


class Computed(NamedTuple):
    """Operations of a layer of one kind in a micro-batch of a rank."""

    forward: Sequence[tuple[str, float]]
    """Kind of result by the names of `recompute: {save: …}`, and seconds."""
    backward: float
    launched: int
    """Operations of the forward pass."""


class Costs:
    """Costs of a model in a phase, on a cluster."""

    module: str | None = None
    """Name of modules that are not ours."""

    def __init__(
        self, model: ModelConfig, run: RunConfig, machine: Machine, phase: PhaseRows
    ) -> None:
        self.model, self.run, self.machine, self.phase = model, run, machine, phase
        self.device = machine.hardware.file.device.kind
        self.trace = self._trace()
        self.passes, self.computed = cache(self._passes), cache(self._computed)
        layers = self.trace.layers
        self.memory = RankMemory(self._parts(), run, self.precision, self.device, layers)
        self.sharded = memoize_by_engine(self._sharded)
        self.beyond: dict[tuple[Any, ...], tuple[float, ...]] = {}
        """Bytes of plans of alike grids beyond the sum of their parts, for a first guess."""
        self._useful: dict[tuple[Split, int, LinearForm], list[tuple[Rule, ...]]] = {}

    def _trace(self) -> ModelTrace:
        return trace_model(self.model, self.phase.seq_len, self.precision, self.device)

    def _parts(self) -> ModelParts:
        return ConfigParts(self.model, self.run, self.phase.seq_len, self.precision, self.device)

    def on(self, machine: Machine) -> Costs:
        """Return the costs on another cluster with devices of this kind."""
        costs = copy(self)
        costs.machine = machine
        costs.passes, costs.computed = cache(costs._passes), cache(costs._computed)
        costs.sharded = memoize_by_engine(costs._sharded)
        costs._useful = {}
        return costs

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.run.precision]

    @cached_property
    def kinds(self) -> Sequence[LayerTrace]:
        return self.trace.kinds

    def variants(self, shape: LayoutShape, gpus: int) -> Iterator[Grid]:
        """Yield the engines and schedules of a shape that the engines' checks accept."""
        return enumerate_grids(shape, self.model, gpus, self.machine.per_node, self.precision)

    def _passes(self, split: Split, ep: int) -> tuple[list[PassTimes], PassTimes]:
        """Return the costs of each kind, and of the head."""
        *layers, head = [self._of_layer(number, split, ep) for number in range(len(self.kinds) + 1)]
        return layers, head

    def _of_layer(self, number: int, split: Split, ep: int) -> PassTimes:
        """Return the costs of a kind; the number of the head is the last one."""
        layer = (*self.kinds, self.trace.head)[number]
        # `attention` and `hyena_li` change a ring's operations alone: others are priced once.
        plain = split if self._rings(layer, split) else Split(split.rows, split.tp, split.cp)
        computed, sent = self.computed(number, plain), self.sent(layer, split, ep)
        forward = {"compute": sum(seconds for _, seconds in computed.forward)}
        backward = {"compute": computed.backward}
        for name, seconds in sent.items():
            forward[name], backward[name] = seconds.forward, seconds.backward
        return PassTimes(forward, backward, partial(self._again, layer, computed, sent))

    def _computed(self, number: int, split: Split) -> Computed:
        layer = (*self.kinds, self.trace.head)[number]
        machine, rings = self.machine, self._rings(layer, split)
        forward = split_operations(layer.forward, "forward", split, rings)
        backward = split_operations(layer.backward, "backward", split, rings)
        return Computed(
            [(work.saved, machine.seconds([work], "forward", over)) for work, over in forward],
            sum(machine.seconds([work], "backward", over) for work, over in backward),
            sum(work.count for work, _ in forward if work.kind == "launch"),
        )

    def _again(
        self, layer: LayerTrace, computed: Computed, sent: Mapping[str, messages.Sent]
    ) -> dict[Rule, float]:
        """Return the seconds of the backward pass that each rule adds."""
        again = {}
        for rule in RULES:
            saved: tuple[str, ...] = rule.save if isinstance(rule, Selective) else ()
            repeated = sum(s.forward - s.saved * ("attention" in saved) for s in sent.values())
            repeated += sum(seconds for kind, seconds in computed.forward if kind not in saved)
            launches = recompute_launches(rule, layer.calls, computed.launched)
            again[rule] = 0.0 if rule == "none" else repeated + self.machine.launches(launches)
        return again

    def sent(self, layer: LayerTrace, split: Split, ep: int) -> dict[str, messages.Sent]:
        """Return the seconds of a layer's messages, by axis."""
        return messages.price_layer(
            layer,
            self.model,
            self.trace,
            self.precision,
            self.machine,
            split,
            ep,
            self._rings(layer, split),
        )

    def _rings(self, layer: LayerTrace, split: Split) -> dict[tuple[int, ...], Operations]:
        return compute_rings(
            layer, self.model, self.trace.seq_len, self.precision, self.machine, split
        )

    def fastest(self, grid: Grid, *, simulate: bool = False) -> Problem:
        """Return the problem of a layout on devices of any memory: that of `problem`, with the
        fastest choice of each kind alone, and without bytes."""
        shape, layout = grid.shape, grid.layout
        split = shape.split
        _, head = self.passes(split, layout.ep)
        engine, sharded = self._engine(grid, split)
        names = list(sharded.modules)
        kinds = []
        for layer, *forms in zip(self.kinds, *self._forms(grid, simulate=simulate), strict=True):
            # Choices share the kind's forward pass and update: what is longer stands in their
            # backward pass, which is exact for one stage.
            times = [(form.forward, form.fastest, form.update) for form in forms]
            forward, update = min(f for f, _, _ in times), min(u for _, _, u in times)
            backward = min(
                fastest + (f - forward) + (u - update) / shape.micro_batches
                for f, fastest, u in times
            )
            shared = layer.operators["shared"]
            kinds.append(
                LayerKind(
                    forward=forward,
                    choices=(Choice(backward),),
                    update=update,
                    module=None if shared is None else names.index(shared),
                )
            )
        stream = self.trace.head.stream * split.rows / split.ranks
        hop = stream * (2 if names else 1)
        stride = grid.shape.dp * layout.cp * layout.tp
        return Problem(
            kinds=tuple(kinds),
            layers=self.trace.layers,
            micro_batches=shape.micro_batches,
            budget=math.inf,
            stages=layout.pp,
            chunks=layout.chunks,
            schedule=layout.pipeline_schedule,
            message=self.machine.hop(hop, stride) if layout.pp > 1 else 0.0,
            first=FixedCosts(
                forward=self.machine.traffic(2 * stream),
                backward=self.machine.traffic(2 * stream),
                update=engine.update(0.0, 0.0, sharded.first),
            ),
            last=FixedCosts(
                forward=engine.forward(head.forward_seconds, sharded.last),
                backward=engine.backward(head.backward_seconds, sharded.last, gathers=False),
                update=engine.update(head.forward_seconds, head.backward_seconds, sharded.last)
                + self.machine.overhead.step_seconds(grid.engine.kind),
            ),
            modules=tuple(
                FixedCosts(update=engine.update(0.0, 0.0, module))
                for module in sharded.modules.values()
            ),
        )

    def problem(
        self,
        grid: Grid,
        budget: float,
        *,
        simulate: bool = False,
        all_choices: bool = False,
    ) -> Problem:
        """Return the problem of a layout. `simulate` adds choices that cannot be executed; without
        `all_choices`, those that another beats in everything are left out."""
        shape, layout = grid.shape, grid.layout
        early_gradients = gradients_before_the_end(grid)
        fastest = self.fastest(grid, simulate=simulate)
        forms = self._forms(grid, simulate=simulate)
        sizes = [self._sizes(grid, first.sequence, early_gradients) for first, *_ in forms]
        kinds = []
        for kind, kind_forms, kind_sizes in zip(
            fastest.kinds, zip(*forms, strict=True), zip(*sizes, strict=True), strict=True
        ):
            kind_choices: list[Choice] = []
            for form, size in zip(kind_forms, kind_sizes, strict=True):
                longer, delayed = form.beyond(kind.forward, kind.update, shape.micro_batches)
                rules = RULES if all_choices else size.useful
                kind_choices += choices(form, size, longer, delayed, rules)
            kinds.append(replace(kind, choices=tuple(kind_choices)))
        state = self.memory.sample_parts(grid.engine, layout.pp, grid.degrees)
        ends = self.memory.footprints.estimate(shape.split, layout.ep, grid.engine.linear)

        def with_bytes(end: FixedCosts, memory: PartMemory, size: Footprint) -> FixedCosts:
            state = memory.step_bytes(size.activations, early_gradients=early_gradients)
            return replace(end, state=state, activations=size.activations, workspace=size.workspace)

        return replace(
            fastest,
            budget=budget,
            kinds=tuple(kinds),
            first=with_bytes(fastest.first, state.first, ends.first),
            last=with_bytes(fastest.last, state.last, ends.last),
            modules=tuple(
                with_bytes(module, memory, Footprint(0.0))
                for module, memory in zip(fastest.modules, state.modules.values(), strict=True)
            ),
        )

    def _forms(self, grid: Grid, *, simulate: bool) -> list[list[Form]]:
        """Return each kind of layer as a layout runs it: with the tensor axis as it is, and to
        `simulate` also as a part of the context axis, where it can be one."""
        forms = []
        for sequence in (False, True) if simulate and self._may_be_sequence(grid) else (False,):
            split = _split(grid, sequence)
            passes, _ = self.passes(split, grid.layout.ep)
            engine, sharded = self._engine(grid, split)
            forms.append(
                [
                    Form(cost, engine, shards, sequence)
                    for cost, shards in zip(passes, sharded.layers, strict=True)
                ]
            )
        return forms

    def _sizes(self, grid: Grid, sequence: bool, early_gradients: bool) -> list[Sizes]:
        """Return the bytes of each kind of layer in one form."""
        split, ep = _split(grid, sequence), grid.layout.ep
        pp, degrees = _degrees(grid, split)
        linear = grid.engine.linear
        sizes = self.memory.footprints.estimate(split, ep, linear).kinds
        state = whole = self.memory.sample_parts(grid.engine, pp, degrees)
        engine, _ = self._engine(grid, split)
        if False in engine.reshards:
            whole = self.memory.sample_parts(grid.engine, pp, degrees, whole_blocks=True)
        columns = sizes, self.useful(split, ep, linear), state.layers, whole.layers
        return [Sizes(*kind_sizes, early_gradients) for kind_sizes in zip(*columns, strict=True)]

    def _engine(
        self, grid: Grid, split: Split
    ) -> tuple[messages.EngineMessages, PartTable[messages.Sharded]]:
        return self.sharded(grid.engine, *_degrees(grid, split))

    def useful(self, split: Split, ep: int, linear: LinearForm) -> list[tuple[Rule, ...]]:
        """Return, for each kind, the rules without those that another beats in everything. An
        engine adds the same bytes to all of them, and never turns the order of their times."""
        key = split, ep, linear
        if key not in self._useful:
            passes, _ = self.passes(split, ep)
            sizes = self.memory.footprints.estimate(*key).kinds
            self._useful[key] = [
                tuple(
                    pareto_front(
                        {rule: (cost.recompute_seconds[rule], *size[rule]) for rule in RULES}
                    )
                )
                for cost, size in zip(passes, sizes, strict=True)
            ]
        return self._useful[key]

    def refine(self, grid: Grid, ways: Sequence[Way]) -> bool:
        """Trace what these ways of the layers use in this layout. Return True if that changed the
        bytes of the problem."""
        split, ep, linear = grid.shape.split, grid.layout.ep, grid.engine.linear
        changed = False
        for sequence in sorted({False, *(way.sequence for way in ways)}):
            way_split = split.context_only if sequence else split
            used: list[dict[Rule, None]] = [{} for _ in self.kinds]
            for kind, way in zip(self.trace.layers, ways, strict=True):
                if way.sequence == sequence:
                    used[kind][way.rule] = None
            if self.memory.footprints.refine(way_split, ep, linear, used):
                self._useful.pop((way_split, ep, linear), None)
                changed = True
        return changed

    def _may_be_sequence(self, grid: Grid) -> bool:
        """True if the tensor ranks could work as context ranks."""
        layout = grid.layout
        whole = replace(layout, tp=1, cp=layout.cp * layout.tp)
        ranks = grid.shape.dp * layout.shards
        wrong = problems(whole, ranks, self.model, [self.phase.seq_len])
        return layout.tp > 1 and layout.ep == 1 and not any(wrong)

    def _sharded(
        self, engine: EngineConfig, pp: int, degrees: Degrees
    ) -> tuple[messages.EngineMessages, PartTable[messages.Sharded]]:
        """Return the messages of an engine, by part of the model."""
        layout = LayoutConfig(pp=pp, tp=degrees.tp, cp=degrees.cp, ep=degrees.ep)
        shards = self.memory.shards_by_part(pp, degrees.tp, degrees.ep)
        elements = [sum(math.prod(s.local) for s in layer.values()) for layer in shards.layers]
        stage_elements = sum(elements[kind] for kind in self.trace.layers) / pp
        engine_messages = messages.EngineMessages(
            engine, layout, degrees.dp, self.precision, self.machine, stage_elements
        )
        return engine_messages, shards.map(engine_messages.of)

    def timelines(
        self, grid: Grid, cuts: Cuts, ways: Sequence[Way], *, every: bool = False
    ) -> list[Timeline]:
        """Return the memory over a step of a rank of each stage, with `every` micro-batch or with
        as many as the highest level needs."""
        ranks = grid.shape.dp * grid.layout.cp * grid.layout.tp
        return self.memory.timelines(
            grid,
            apply_layer_choices(grid.engine, [(way.reshard, way.sequence) for way in ways], ranks),
            cuts,
            [way.rule for way in ways],
            [way.sequence for way in ways],
            every=every,
        )


def gradients_before_the_end(grid: Grid) -> bool:
    """True if gradients of the first micro-batch are there while later ones are alive."""
    layout, micro_batches = grid.layout, grid.shape.micro_batches
    schedule = layout.pipeline_schedule
    return micro_batches > schedule.warm_up(layout.pp, layout.chunks, micro_batches)


def _split(grid: Grid, sequence: bool) -> Split:
    split = grid.shape.split
    return split.context_only if sequence else split


def _degrees(grid: Grid, split: Split) -> tuple[int, Degrees]:
    """Return the stages, and the degrees of layers that share their rows so."""
    return grid.layout.pp, replace(grid.degrees, tp=split.tp, cp=split.cp)
