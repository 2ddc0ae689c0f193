"""Costs of the layers of a model in a layout: the problem that the search solves.

Times follow from the trace of a layer and the figures of the hardware. Bytes of layers and of the
state add up (footprints.py); what does not is counted by the timeline of a step (`timelines`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

from ....models.accounting.step import Timeline
from ....models.options.precision import PRECISIONS, Precision
from ....models.options.recompute import Results, Rule, Selective
from ...engines.config import EngineConfig
from ...layout.checks import problems
from ...layout.config import LayoutConfig
from ...pipeline.cuts import Cuts
from ...run.config import RunConfig
from ..footprints import Footprint, unbeaten
from ..memory import ahead
from ..model_parts import OwnParts
from ..rank_memory import Between, ModelParts, RankMemory, as_context, engine_of, remembered
from . import messages
from .division.problem import Choice, Fixed, Problem, Sort
from .grid import Grid
from .machine import Machine, Split
from .operations.trace import LayerTrace, ModelTrace, Operations, of_rank, rings_of, trace
from .work import RULES, Parts, Passes, recompute_launches

if TYPE_CHECKING:
    from ....dataplane.order.timeline import PhaseRows
    from ....models.config import ModelConfig

ShardedParts = tuple[
    list[messages.Sharded], messages.Sharded, messages.Sharded, dict[str, messages.Sharded]
]


class Form(NamedTuple):
    """A layer of one sort as a layout runs it, before its own choices."""

    passes: Passes
    sizes: Mapping[Rule, Footprint]
    useful: Sequence[Rule]
    """Rules that no other beats in everything."""
    engine: messages.EngineMessages
    shards: messages.Sharded
    held: Between
    whole: Between
    """With weights that stay whole from the forward to the backward pass."""
    later: bool
    """True if a stage has gradients while all of its micro-batches are alive."""
    sequence: bool
    """True: the tensor ranks work as context ranks, with whole weights. Simulated only."""

    @property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return self.engine.forward(self.passes.ahead, self.shards)

    @property
    def update(self) -> float:
        """Seconds of a step outside the passes."""
        return self.engine.update(self.passes.ahead, self.passes.back, self.shards)


class Way(NamedTuple):
    """How a layer runs."""

    rule: Rule
    reshard: bool | None
    """False: weights stay gathered from the forward to the backward pass. None: as the engine."""
    passes: Passes
    engine: messages.EngineMessages
    shards: messages.Sharded
    sequence: bool = False
    """True: the tensor ranks work as context ranks, with whole weights. Simulated only."""
    later: float = 0.0
    """Seconds of the update beyond those of the sort, for each micro-batch."""

    @property
    def key(self) -> tuple[Rule, bool | None, bool]:
        """The choice, without its costs."""
        return self.rule, self.reshard, self.sequence

    @property
    def forward(self) -> Parts:
        """Seconds of the forward pass by part."""
        return self._with_messages(self.passes.forward, self.engine.forward)

    @property
    def backward(self) -> Parts:
        again = self.passes.again[self.rule] + self.engine.again(self.rule)
        back = dict(self.passes.backward, recompute=again)
        whole = partial(self.engine.backward, gathers=self.reshard is None)
        found = self._with_messages(back, whole)
        return {**found, "update": self.later} if self.later else found

    def _with_messages(
        self, parts: Parts, whole: Callable[[float, messages.Sharded], float]
    ) -> Parts:
        """Return the parts of a pass, with the time of its messages that it does not hide."""
        busy = sum(parts.values())
        more = whole(busy, self.shards) - busy
        return {**parts, "data": more} if more else parts


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
        self.passes = cache(self._passes)
        layers = self.trace.layers
        self.memory = RankMemory(self._parts(), run, self.precision, self.device, layers)
        self.sharded = remembered(self._sharded)
        self.beyond: dict[tuple[Any, ...], tuple[float, ...]] = {}
        """Bytes of plans of alike grids beyond the sum of their parts, for a first guess."""
        self._useful: dict[tuple[Split, int], list[tuple[Rule, ...]]] = {}

    def _trace(self) -> ModelTrace:
        return trace(self.model, self.phase.seq_len, self.precision, self.device)

    def _parts(self) -> ModelParts:
        return OwnParts(self.model, self.run, self.phase.seq_len, self.precision, self.device)

    def on(self, machine: Machine) -> Costs:
        """Return the costs on another cluster with devices of this kind."""
        other = copy(self)
        other.machine = machine
        other.passes = cache(other._passes)
        other.sharded = remembered(other._sharded)
        other._useful = {}
        return other

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.run.precision]

    @cached_property
    def sorts(self) -> Sequence[LayerTrace]:
        return self.trace.sorts

    def _passes(self, split: Split, ep: int) -> tuple[list[Passes], Passes]:
        """Return the costs of each sort, and of the head."""
        found = [self._of_layer(each, split, ep) for each in (*self.sorts, self.trace.head)]
        return found[:-1], found[-1]

    def _of_layer(self, layer: LayerTrace, split: Split, ep: int) -> Passes:
        machine, rings = self.machine, self._rings(layer, split)
        done = of_rank(layer.forward, "forward", split, rings)
        each = [machine.seconds([work], "forward", own) for work, own in done]
        forward = {"compute": sum(each)}
        backward = {
            "compute": sum(
                machine.seconds([work], "backward", own)
                for work, own in of_rank(layer.backward, "backward", split, rings)
            )
        }
        sent = self.sent(layer, split, ep)
        for name, seconds in sent.items():
            forward[name], backward[name] = seconds.forward, seconds.backward
        again = {}
        launched = sum(work.count for work, _ in done if work.kind == "launch")
        for rule in RULES:
            saved: tuple[Results, ...] = rule.save if isinstance(rule, Selective) else ()
            repeated = sum(s.forward - s.saved * ("attention" in saved) for s in sent.values())
            repeated += sum(
                seconds
                for seconds, (work, _) in zip(each, done, strict=True)
                if not saved or work.saved not in saved
            )
            more = machine.launches(recompute_launches(rule, layer.calls, launched))
            again[rule] = 0.0 if rule == "none" else repeated + more
        return Passes(forward, backward, again)

    def sent(self, layer: LayerTrace, split: Split, ep: int) -> dict[str, messages.Sent]:
        """Return the seconds of a layer's messages, by axis."""
        return messages.of_layer(
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
        return rings_of(layer, self.model, self.trace.seq_len, self.precision, self.machine, split)

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
        split = shape.split
        _, head = self.passes(split, layout.ep)
        sizes = self.memory.footprints.of(split, layout.ep)
        engine, (_, first, at_end, modules) = self.sharded(
            grid.engine, layout.pp, shape.dp, layout.cp, layout.tp, layout.ep
        )
        degrees = layout.pp, shape.dp, layout.cp, layout.tp, layout.ep
        memory = self.memory.held(grid.engine, *degrees)
        # Gradients of the first micro-batch are there while later ones are alive.
        later = shape.micro_batches > ahead(layout)
        names = list(modules)
        forms = [self._forms(grid, sequence=False)]
        if simulate and self._may_be_sequence(grid):
            forms.append(self._forms(grid, sequence=True))
        sorts = []
        for layer, *own in zip(self.sorts, *forms, strict=True):
            # Choices share the sort's forward pass and update: what is longer stands in their
            # backward pass, which is exact for one stage.
            forward, update = min(f.forward for f in own), min(f.update for f in own)
            shared = layer.layer["shared"]
            sorts.append(
                Sort(
                    forward=forward,
                    choices=tuple(
                        choice
                        for form in own
                        for choice in _choices(
                            form,
                            form.forward - forward,
                            (form.update - update) / shape.micro_batches,
                            RULES if all_choices else form.useful,
                        )
                    ),
                    update=update,
                    module=None if shared is None else names.index(shared),
                )
            )
        stream = self.trace.head.stream * split.rows / split.ranks
        hop = stream * (2 if modules else 1)
        stride = grid.shape.dp * layout.cp * layout.tp
        return Problem(
            sorts=tuple(sorts),
            layers=self.trace.layers,
            micro_batches=shape.micro_batches,
            budget=budget,
            stages=layout.pp,
            chunks=layout.chunks,
            schedule=layout.schedule,
            message=self.machine.hop(hop, stride) if layout.pp > 1 else 0.0,
            first=Fixed(
                forward=self.machine.traffic(2 * stream),
                backward=self.machine.traffic(2 * stream),
                held=memory.first.held(sizes.first.kept, later=later),
                kept=sizes.first.kept,
                work=sizes.first.work,
                update=engine.update(0.0, 0.0, first),
            ),
            last=Fixed(
                forward=engine.forward(head.ahead, at_end),
                backward=engine.backward(head.back, at_end, gathers=False),
                held=memory.last.held(sizes.last.kept, later=later),
                kept=sizes.last.kept,
                work=sizes.last.work,
                update=engine.update(head.ahead, head.back, at_end)
                + self.machine.overhead.step_of(grid.engine.kind),
            ),
            modules=tuple(
                Fixed(held=held.held(0.0, later=later), update=engine.update(0.0, 0.0, shards))
                for held, shards in zip(memory.modules, modules.values(), strict=True)
            ),
        )

    def _forms(self, grid: Grid, *, sequence: bool) -> list[Form]:
        """Return each sort of layer as a layout runs it, with the tensor axis as it is or as a part
        of the context axis."""
        shape, layout = grid.shape, grid.layout
        split = as_context(shape.split) if sequence else shape.split
        tp, cp = split.tp, split.cp
        passes, _ = self.passes(split, layout.ep)
        sizes = self.memory.footprints.of(split, layout.ep).sorts
        engine, (layers, *_) = self.sharded(grid.engine, layout.pp, shape.dp, cp, tp, layout.ep)
        degrees = layout.pp, shape.dp, cp, tp, layout.ep
        held = self.memory.held(grid.engine, *degrees)
        whole = self.memory.whole(grid.engine, *degrees) if engine.gathers_blocks else held
        later = shape.micro_batches > ahead(layout)
        columns = passes, sizes, self.useful(split, layout.ep), layers, held.layers, whole.layers
        return [
            Form(cost, size, useful, engine, shards, one, other, later, sequence)
            for cost, size, useful, shards, one, other in zip(*columns, strict=True)
        ]

    def useful(self, split: Split, ep: int) -> list[tuple[Rule, ...]]:
        """Return, for each sort, the rules without those that another beats in everything. An
        engine adds the same bytes to all of them, and never turns the order of their times."""
        key = split, ep
        if key not in self._useful:
            passes, _ = self.passes(split, ep)
            sizes = self.memory.footprints.of(split, ep).sorts
            self._useful[key] = [
                tuple(unbeaten({rule: (cost.again[rule], *size[rule]) for rule in RULES}))
                for cost, size in zip(passes, sizes, strict=True)
            ]
        return self._useful[key]

    def refine(self, grid: Grid, ways: Sequence[Way]) -> bool:
        """Trace what these ways of the layers use in this layout. Return True if that changed the
        bytes of the problem."""
        split, ep, changed = grid.shape.split, grid.layout.ep, False
        for sequence in sorted({False, *(way.sequence for way in ways)}):
            own = as_context(split) if sequence else split
            used: list[dict[Rule, None]] = [{} for _ in self.sorts]
            for sort, way in zip(self.trace.layers, ways, strict=True):
                if way.sequence == sequence:
                    used[sort][way.rule] = None
            if self.memory.footprints.refine(own, ep, used):
                self._useful.pop((own, ep), None)
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
        self, engine: EngineConfig, pp: int, dp: int, cp: int, tp: int, ep: int
    ) -> tuple[messages.EngineMessages, ShardedParts]:
        """Return the messages of an engine: of a layer of each sort, the embedding, the head and
        the shared modules."""
        layout = LayoutConfig(pp=pp, tp=tp, cp=cp, ep=ep)
        layers, first, last, modules = self.memory.shards_of_sorts(tp, ep)
        each = [sum(math.prod(s.local) for s in shards.values()) for shards in layers]
        own = sum(each[sort] for sort in self.trace.layers) / pp
        found = messages.EngineMessages(engine, layout, dp, self.precision, self.machine, own)
        return found, (
            [found.of(shards) for shards in layers],
            found.of(first),
            found.of({**last, **first} if self.memory.parts.tied(pp) else last),
            {name: found.of(shards) for name, shards in modules.items()},
        )

    def timelines(
        self, grid: Grid, cuts: Cuts, ways: Sequence[Way], *, every: bool = False
    ) -> list[Timeline]:
        """Return the memory over a step of a rank of each stage, with `every` micro-batch or with
        as many as the highest level needs."""
        ranks = grid.shape.dp * grid.layout.cp * grid.layout.tp
        return self.memory.timelines(
            grid,
            engine_of(grid.engine, [(way.reshard, way.sequence) for way in ways], ranks),
            cuts,
            [way.rule for way in ways],
            [way.sequence for way in ways],
            every=every,
        )


def _choices(form: Form, longer: float, delayed: float, rules: Sequence[Rule]) -> Iterator[Choice]:
    """Yield the choices of a layer in one form. Its forward pass is `longer` than that of the sort,
    and its update `delayed` for each micro-batch."""
    cost, sizes, _, engine, shards, held, whole, later, sequence = form
    costs = [
        (rule, cost.back + cost.again[rule] + engine.again(rule), *sizes[rule]) for rule in rules
    ]
    for reshard in (None, False) if engine.gathers_blocks else (None,):
        own, running = (held, held.running) if reshard is None else (whole, 0)
        passes = engine.backwards([back for _, back, *_ in costs], shards, gathers=reshard is None)
        for (rule, _, kept, work), seconds in zip(costs, passes, strict=True):
            yield Choice(
                name=Way(rule, reshard, cost, engine, shards, sequence, delayed),
                backward=seconds + longer + delayed,
                held=own.held(kept, later=later),
                kept=kept,
                work=work + running,
            )
