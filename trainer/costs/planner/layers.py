"""Costs of the layers of a model in a layout: the problem that the search solves.

Times follow from the trace of a layer and the figures of the hardware; bytes from the memory
accounting (models/accounting), with what it does not count yet: whole weights and gradients of a
block while it runs, and gathered inputs under tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ....models.accounting.count import build_meta
from ....models.accounting.memory import KeptLayer
from ....models.accounting.state import Degrees, Shards, StatePart, device_bytes, state_bytes
from ....models.layers.recompute import Results, Rule, Selective
from ....models.precision import PRECISIONS, Precision
from ...engines.engine import EngineConfig
from ...engines.fsdp2 import Fsdp2Config
from ...layout.checks import problems
from ...layout.config import LayoutConfig
from ...run.config import RunConfig
from ..state import engine_state
from . import messages
from .division.problem import Choice, Fixed, Problem, Sort
from .grid import Grid
from .machine import Machine, Split
from .trace import LayerTrace, ModelTrace, local_shards, one_of_each, trace
from .work import RULES, Parts, Passes, recompute_launches

if TYPE_CHECKING:
    from ....dataplane.order.timeline import PhaseRows
    from ....models.config import ModelConfig

T = TypeVar("T")

ShardedParts = tuple[
    list[messages.Sharded], messages.Sharded, messages.Sharded, dict[str, messages.Sharded]
]


class Form(NamedTuple):
    """A layer of one sort as a layout runs it, before its own choices."""

    passes: Passes
    engine: messages.EngineMessages
    shards: messages.Sharded
    held: float
    """Bytes of the state."""
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
        back = dict(self.passes.backward, recompute=self.passes.again[self.rule])
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
        self.shards = cache(self._shards)
        self.memory = _remembered(self._memory)
        self.sharded = _remembered(self._sharded)

    def _trace(self) -> ModelTrace:
        return trace(self.model, self.phase.seq_len, self.precision, self.device)

    def on(self, machine: Machine) -> Costs:
        """Return the costs on another cluster with devices of this kind."""
        other = copy(self)
        other.machine = machine
        other.passes = cache(other._passes)
        other.sharded = _remembered(other._sharded)
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
        machine, part = self.machine, split.rows / split.ranks
        each = [machine.seconds([work], "forward", split) for work in layer.forward]
        forward = {"compute": sum(each)}
        backward = {"compute": machine.seconds(layer.backward, "backward", split)}
        sent = messages.of_layer(layer, self.model, self.trace, self.precision, machine, split, ep)
        for name, (there, back) in sent.items():
            forward[name], backward[name] = there, back
        again, kept, work = {}, {}, {}
        sizes = KeptLayer(layer.everything, layer.stream, layer.calls, layer.results, layer.needed)
        launched = sum(work.count for work in layer.forward if work.kind == "launch")
        gathered = layer.calls * layer.stream * split.rows / split.cp * (1 - 1 / split.tp)
        for rule in RULES:
            saved: tuple[Results, ...] = rule.save if isinstance(rule, Selective) else ()
            repeated = sum(there for there, _ in sent.values()) + sum(
                seconds
                for seconds, done in zip(each, layer.forward, strict=True)
                if not saved or done.saved not in saved
            )
            more = machine.launches(recompute_launches(rule, layer.calls, launched))
            again[rule] = 0.0 if rule == "none" else repeated + more
            kept[rule] = sizes.forward(rule) * part + (gathered if rule == "none" else 0.0)
            work[rule] = sizes.backward(rule) * part + (0.0 if rule == "none" else gathered)
        return Passes(forward, backward, again, kept, work)

    def _shards(self, tp: int, ep: int) -> tuple[list[Shards], Shards, Shards, dict[str, Shards]]:
        """Return the local shards of each sort of layer, the embedding, the head with the final
        norm, and the shared modules."""
        layers: list[dict[str, Any]] = [{} for _ in self.sorts]
        first: dict[str, Any] = {}
        last: dict[str, Any] = {}
        modules: dict[str, dict[str, Any]] = {}
        for name, shard in local_shards(self.model, tp, ep).items():
            root, _, rest = name.partition(".")
            if root == "blocks":
                layers[int(rest.partition(".")[0])][name] = shard
            elif root == "shared":
                modules.setdefault(rest.partition(".")[0], {})[name] = shard
            else:
                (first if root in ("embedding", "positions") else last)[name] = shard
        return list(layers), first, last, dict(modules)

    @cached_property
    def _meta(self) -> Any:
        return build_meta(one_of_each(self.model))

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
        engine, (_, first, at_end, modules) = self.sharded(
            grid.engine, layout.pp, shape.dp, layout.cp, layout.tp, layout.ep
        )
        memory = self.memory(grid.engine, layout.pp, shape.dp, layout.cp, layout.tp, layout.ep)
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
                            RULES if all_choices else form.passes.useful,
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
            budget=budget - memory.buffers,
            stages=layout.pp,
            chunks=layout.chunks,
            schedule=layout.schedule,
            message=self.machine.hop(hop, stride) if layout.pp > 1 else 0.0,
            first=Fixed(
                forward=self.machine.traffic(2 * stream),
                backward=self.machine.traffic(2 * stream),
                held=memory.first,
                work=engine.work(first),
                update=engine.update(0.0, 0.0, first),
            ),
            last=Fixed(
                forward=engine.forward(head.ahead, at_end),
                backward=engine.backward(head.back, at_end, gathers=False),
                held=memory.last,
                kept=head.kept["none"],
                work=engine.work(at_end),
                update=engine.update(head.ahead, head.back, at_end)
                + self.machine.overhead.step_of(grid.engine.kind),
            ),
            modules=tuple(
                Fixed(held=held, update=engine.update(0.0, 0.0, shards))
                for held, shards in zip(memory.modules, modules.values(), strict=True)
            ),
        )

    def _forms(self, grid: Grid, *, sequence: bool) -> list[Form]:
        """Return each sort of layer as a layout runs it, with the tensor axis as it is or as a part
        of the context axis."""
        shape, layout = grid.shape, grid.layout
        split, tp, cp = shape.split, layout.tp, layout.cp
        if sequence:
            split, tp, cp = replace(split, tp=1, cp=cp * tp), 1, cp * tp
        passes, _ = self.passes(split, layout.ep)
        engine, (layers, *_) = self.sharded(grid.engine, layout.pp, shape.dp, cp, tp, layout.ep)
        memory = self.memory(grid.engine, layout.pp, shape.dp, cp, tp, layout.ep)
        return [
            Form(cost, engine, shards, held, sequence)
            for cost, shards, held in zip(passes, layers, memory.layers, strict=True)
        ]

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
        found = messages.EngineMessages(engine, layout, dp, self.precision, self.machine)
        layers, first, last, modules = self.shards(tp, ep)
        return found, (
            [found.of(shards) for shards in layers],
            found.of(first),
            found.of({**last, **first} if self.tied(pp) else last),
            {name: found.of(shards) for name, shards in modules.items()},
        )

    def _memory(self, engine: EngineConfig, pp: int, dp: int, cp: int, tp: int, ep: int) -> Memory:
        """Return the bytes of the state of an engine on a device."""
        layout = LayoutConfig(pp=pp, tp=tp, cp=cp, ep=ep)
        run = replace(self.run, engine=engine, layout=layout)
        state = engine_state(run, self._meta, self.precision, self.device).parts
        degrees = Degrees(dp=dp, tp=tp, cp=cp, ep=ep)
        parts = [part for part in state if part.name != "buffers"]
        buffers = [part for part in state if part.name == "buffers"]
        layers, first, last, modules = self.shards(tp, ep)

        def held(shards: Shards, parts: Sequence[StatePart] = parts) -> float:
            return device_bytes(state_bytes(parts, shards, degrees)) if shards else 0.0

        of_layers = parts
        if isinstance(engine, Fsdp2Config) and engine.gather_of(layout) == "block":
            # Whole weights of a block are in the working set (EngineMessages.work).
            of_layers = [part for part in parts if part.name != "weights" or part.sharded_over]

        everything: dict[str, Any] = {**first, **last}
        for number, sort in enumerate(self.trace.layers):
            everything |= {f"{number}.{name}": shard for name, shard in layers[sort].items()}
        for shards in modules.values():
            everything |= shards
        return Memory(
            layers=[held(shards, of_layers) for shards in layers],
            first=held(first),
            last=held({**last, **first} if self.tied(pp) else last),
            modules=[held(shards) for shards in modules.values()],
            buffers=sum(state_bytes(buffers, everything, degrees).values()),
        )

    def tied(self, pp: int) -> bool:
        """True if the last stage holds the embedding too."""
        return self.model.tie_embeddings and pp > 1


@dataclass(frozen=True)
class Memory:
    """Bytes of the state on a device."""

    layers: Sequence[float]
    """Bytes of a layer of each sort."""
    first: float
    last: float
    modules: Sequence[float]
    buffers: float
    """Buffers of a stage, at most."""


def _remembered(
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


def _choices(form: Form, longer: float, later: float, rules: Sequence[Rule]) -> Iterator[Choice]:
    """Yield the choices of a layer in one form. Its forward pass is `longer` than that of the sort,
    and its update `later` for each micro-batch."""
    cost, engine, shards, held, sequence = form
    work = engine.work(shards)
    for reshard in (None, False) if engine.gathers_blocks else (None,):
        for rule in rules:
            back = cost.back + cost.again[rule]
            yield Choice(
                name=Way(rule, reshard, cost, engine, shards, sequence, later),
                backward=engine.backward(back, shards, gathers=reshard is None) + longer + later,
                held=held if reshard is None else held + engine.whole_weights(shards),
                kept=cost.kept[rule],
                work=cost.work[rule] + work,
            )
