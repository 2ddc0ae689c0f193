"""Price a model's layouts, and state the problem that the search solves for each.

Times follow from traces and the hardware's rates. Bytes add up over layers (planner/memory); what
does not add up, the timeline of a step counts (`timelines`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import cache, partial
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
from ...trainer.run.layout_plan import model_hash
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
from .experts import price_share, select_expert_axis
from .forms import LayerBytes, LayerForm, LayerPlan, list_choices
from .machine import Machine
from .rings import compute_rings, split_operations

if TYPE_CHECKING:
    from ...dataplane.order.timeline import PhaseRows
    from ...models.config.config import ModelConfig


class ComputeTimes(NamedTuple):
    """Compute times in a micro-batch, for a layer kind."""

    forward: Sequence[tuple[str, float]]
    """Pairs (kind of result, as in `recompute: {save: …}`, seconds)."""
    backward: float
    num_launches: int
    """Launches in the forward pass."""


class Costs:
    """Prices a model's layouts for a phase and a cluster."""

    module: str | None = None
    """Another program's modules, as package:function."""

    def __init__(
        self, model: ModelConfig, run: RunConfig, machine: Machine, phase: PhaseRows
    ) -> None:
        self.model, self.run, self.machine, self.phase = model, run, machine, phase
        self.device = machine.hardware.file.device.kind
        self.trace = self._trace()
        self.kinds = self.trace.kinds
        self.passes, self.compute_times = cache(self._passes), cache(self._compute_times)
        layers = self.trace.layers
        self.memory = RankMemory(self._parts(), run, self.precision, self.device, layers)
        self.price_engine = memoize_by_engine(self._price_engine)
        self.excess: dict[tuple[Any, ...], tuple[float, ...]] = {}
        """Bytes that timelines count beyond the sum, by settings that similar grids share: the
        first guess for the next plan."""
        self._useful_rules: dict[tuple[Split, int, LinearForm], list[tuple[Rule, ...]]] = {}

    def _trace(self) -> ModelTrace:
        return trace_model(self.model, self.phase.seq_len, self.precision, self.device)

    def _parts(self) -> ModelParts:
        return ConfigParts(self.model, self.run, self.phase.seq_len, self.precision, self.device)

    def replace_machine(self, machine: Machine) -> Costs:
        """Return the costs on another cluster with the same kind of device."""
        costs = copy(self)
        costs.machine = machine
        costs.passes, costs.compute_times = cache(costs._passes), cache(costs._compute_times)
        costs.price_engine = memoize_by_engine(costs._price_engine)
        costs._useful_rules = {}
        return costs

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.run.precision]

    @property
    def model_hash(self) -> str:
        """Hash in a plan file."""
        return model_hash(self.model)

    def grids(self, shape: LayoutShape, gpus: int, *, offload: bool = False) -> Iterator[Grid]:
        """Yield the shape with every engine and schedule that the engines' checks accept."""
        size = gpus, self.machine.per_node
        return enumerate_grids(shape, self.model, *size, self.precision, offload=offload)

    def _passes(self, split: Split, ep: int) -> tuple[list[PassTimes], PassTimes]:
        """Price all layer kinds, and the head."""
        *kinds, head = [self._price_layer(n, split, ep) for n in range(len(self.kinds) + 1)]
        return kinds, head

    def _price_layer(self, number: int, split: Split, ep: int) -> PassTimes:
        """Price a layer kind by number; the head's number is the last."""
        layer = (*self.kinds, self.trace.head)[number]
        # The forms of rows change rings alone: other layers are priced once.
        compute_split = split
        if not self._rings(layer, split):
            compute_split = Split(split.rows, split.tp, split.cp)
        compute = self.compute_times(number, compute_split, select_expert_axis(layer, ep))
        message_times = self.price_messages(layer, split, ep)
        forward = {"compute": sum(seconds for _, seconds in compute.forward)}
        backward = {"compute": compute.backward}
        for axis, times in message_times.items():
            forward[axis], backward[axis] = times.forward, times.backward
        price_recompute = partial(self._price_recompute, layer, compute, message_times)
        return PassTimes(forward, backward, price_recompute)

    def _compute_times(self, number: int, split: Split, ep: int) -> ComputeTimes:
        layer = (*self.kinds, self.trace.head)[number]
        machine, rings = self.machine, self._rings(layer, split)
        forward = split_operations(layer.forward, "forward", split, rings)
        backward = split_operations(layer.backward, "backward", split, rings)
        return ComputeTimes(
            [(work.saved, price_share(machine, work, "forward", cut, ep)) for work, cut in forward],
            sum(price_share(machine, work, "backward", cut, ep) for work, cut in backward),
            sum(work.count for work, _ in forward if work.kind == "launch"),
        )

    def _price_recompute(
        self,
        layer: LayerTrace,
        compute: ComputeTimes,
        message_times: Mapping[str, messages.MessageTimes],
    ) -> dict[Rule, float]:
        """Return the seconds that every rule adds to the backward pass."""
        seconds_by_rule = {}
        for rule in RULES:
            saved: tuple[str, ...] = rule.save if isinstance(rule, Selective) else ()
            repeats = not saved or self.machine.program.recompute_messages
            seconds = sum(
                times.forward - times.saved * ("attention" in saved)
                for times in (message_times.values() if repeats else ())
            )
            seconds += sum(seconds for kind, seconds in compute.forward if kind not in saved)
            launches = recompute_launches(rule, layer.calls, compute.num_launches)
            seconds_by_rule[rule] = 0.0 if rule == "none" else seconds + self.machine.host(launches)
        return seconds_by_rule

    def price_messages(
        self, layer: LayerTrace, split: Split, ep: int
    ) -> dict[str, messages.MessageTimes]:
        """Return the seconds in a layer's messages, by axis."""
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

    def fastest_problem(self, grid: Grid, *, simulate: bool = False) -> Problem:
        """Return `problem` for unlimited memory: the fastest choices alone, without bytes."""
        shape, layout = grid.shape, grid.layout
        split = shape.split
        _, head = self.passes(split, layout.ep)
        engine, parameters = self._price_split(grid, split)
        module_names = list(parameters.modules)
        kinds = []
        for layer, *forms in zip(self.kinds, *self.forms(grid, simulate=simulate), strict=True):
            # A kind's choices share forward pass and update. What a form adds to them counts in
            # its backward pass, which is exact for one stage.
            times = [(form.forward, form.min_backward, form.update) for form in forms]
            forward = min(form_forward for form_forward, _, _ in times)
            update = min(form_update for _, _, form_update in times)
            backward = min(
                min_backward
                + (form_forward - forward)
                + (form_update - update) / shape.micro_batches
                for form_forward, min_backward, form_update in times
            )
            shared = layer.operators["shared"]
            kinds.append(
                LayerKind(
                    forward=forward,
                    choices=(Choice(backward),),
                    update=update,
                    module=None if shared is None else module_names.index(shared),
                )
            )
        stream = self.trace.head.stream * split.rows / split.ranks
        hop_bytes = stream * (2 if module_names else 1)
        stride = grid.shape.dp * layout.cp * layout.tp
        return Problem(
            kinds=tuple(kinds),
            layers=self.trace.layers,
            micro_batches=shape.micro_batches,
            budget=math.inf,
            stages=layout.pp,
            chunks=layout.chunks,
            schedule=layout.pipeline_schedule,
            message=self.machine.hop(hop_bytes, stride) if layout.pp > 1 else 0.0,
            first=FixedCosts(
                forward=self.machine.traffic(2 * stream),
                backward=self.machine.traffic(2 * stream),
                update=engine.update(0.0, 0.0, parameters.first),
            ),
            last=FixedCosts(
                forward=engine.forward(head.forward_seconds, parameters.last),
                backward=engine.backward(head.backward_seconds, parameters.last, gathers=False),
                update=engine.update(head.forward_seconds, head.backward_seconds, parameters.last)
                + self.machine.overhead.step_seconds(grid.engine.kind),
            ),
            modules=tuple(
                FixedCosts(update=engine.update(0.0, 0.0, module))
                for module in parameters.modules.values()
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
        """Return a layout's problem, with bytes.

        `simulate` adds choices that cannot be executed. Without `all_choices`, dominated choices
        are left out.
        """
        shape, layout = grid.shape, grid.layout
        early_gradients = grid.has_early_gradients
        fastest = self.fastest_problem(grid, simulate=simulate)
        forms = self.forms(grid, simulate=simulate)
        sizes = [self._sizes(grid, first.sequence, early_gradients) for first, *_ in forms]
        kinds = []
        for kind, kind_forms, kind_sizes in zip(
            fastest.kinds, zip(*forms, strict=True), zip(*sizes, strict=True), strict=True
        ):
            kind_choices: list[Choice] = []
            for form, size in zip(kind_forms, kind_sizes, strict=True):
                extra_forward = form.forward - kind.forward
                extra_update = (form.update - kind.update) / shape.micro_batches
                rules = RULES if all_choices else size.useful_rules
                kind_choices += list_choices(form, size, extra_forward, extra_update, rules)
            kinds.append(replace(kind, choices=tuple(kind_choices)))
        state = self.memory.sample_parts(grid.engine, layout.pp, grid.degrees)
        ends = self.memory.footprints.estimate(shape.split, layout.ep, grid.engine.linear)

        def add_bytes(part: FixedCosts, memory: PartMemory, size: Footprint) -> FixedCosts:
            activations, workspace = size
            state = memory.step_bytes(activations, early_gradients=early_gradients)
            return replace(part, state=state, activations=activations, workspace=workspace)

        return replace(
            fastest,
            budget=budget,
            kinds=tuple(kinds),
            first=add_bytes(fastest.first, state.first, ends.first),
            last=add_bytes(fastest.last, state.last, ends.last),
            modules=tuple(
                add_bytes(module, memory, Footprint(0.0))
                for module, memory in zip(fastest.modules, state.modules.values(), strict=True)
            ),
        )

    def forms(self, grid: Grid, *, simulate: bool) -> list[list[LayerForm]]:
        """Return the layer kinds as a layout runs them, by form. With `simulate`, tensor ranks work
        as context ranks in a second form, where they can."""
        forms = []
        for sequence in (False, True) if simulate and self._may_be_sequence(grid) else (False,):
            split = _select_split(grid, sequence)
            passes, _ = self.passes(split, grid.layout.ep)
            engine, parameters = self._price_split(grid, split)
            kinds = zip(passes, parameters.layers, strict=True)
            forms.append([LayerForm(times, engine, costs, sequence) for times, costs in kinds])
        return forms

    def _sizes(self, grid: Grid, sequence: bool, early_gradients: bool) -> list[LayerBytes]:
        """Return the layer kinds' bytes in a form."""
        split, ep = _select_split(grid, sequence), grid.layout.ep
        pp, degrees = _derive_degrees(grid, split)
        linear = grid.engine.linear
        sizes = self.memory.footprints.estimate(split, ep, linear).kinds
        state = unsharded = self.memory.sample_parts(grid.engine, pp, degrees)
        engine, _ = self._price_split(grid, split)
        if False in engine.reshards:
            unsharded = self.memory.sample_parts(grid.engine, pp, degrees, unsharded_blocks=True)
        columns = sizes, self.useful_rules(split, ep, linear), state.layers, unsharded.layers
        return [
            LayerBytes(*kind_sizes, early_gradients) for kind_sizes in zip(*columns, strict=True)
        ]

    def _price_split(
        self, grid: Grid, split: Split
    ) -> tuple[messages.EngineMessages, PartTable[messages.ParameterCosts]]:
        return self.price_engine(grid.engine, *_derive_degrees(grid, split))

    def useful_rules(self, split: Split, ep: int, linear: LinearForm) -> list[tuple[Rule, ...]]:
        """Return the rules that no other dominates, by kind.

        An engine adds the same bytes to all rules, and never changes the order of their times.
        """
        key = split, ep, linear
        if key not in self._useful_rules:
            passes, _ = self.passes(split, ep)
            sizes = self.memory.footprints.estimate(*key).kinds
            self._useful_rules[key] = [
                tuple(
                    pareto_front(
                        {rule: (cost.recompute_seconds[rule], *size[rule]) for rule in RULES}
                    )
                )
                for cost, size in zip(passes, sizes, strict=True)
            ]
        return self._useful_rules[key]

    def refine(self, grid: Grid, layer_plans: Sequence[LayerPlan]) -> bool:
        """Trace this layout for the rules in these plans. Return True if the problem changed."""
        split, ep, linear = grid.shape.split, grid.layout.ep, grid.engine.linear
        changed = False
        for sequence in sorted({False, *(plan.sequence for plan in layer_plans)}):
            plan_split = split.context_only if sequence else split
            used_rules: list[dict[Rule, None]] = [{} for _ in self.kinds]
            for kind, plan in zip(self.trace.layers, layer_plans, strict=True):
                if plan.sequence == sequence:
                    used_rules[kind][plan.rule] = None
            if self.memory.footprints.refine(plan_split, ep, linear, used_rules):
                self._useful_rules.pop((plan_split, ep, linear), None)
                changed = True
        return changed

    def _may_be_sequence(self, grid: Grid) -> bool:
        """Return True if the tensor ranks could work as context ranks."""
        layout = grid.layout
        context_layout = replace(layout, tp=1, cp=layout.cp * layout.tp)
        ranks = grid.shape.dp * layout.shards
        refusals = problems(context_layout, ranks, self.model, [self.phase.seq_len])
        return layout.tp > 1 and layout.ep == 1 and not any(refusals)

    def _price_engine(
        self, engine: EngineConfig, pp: int, degrees: Degrees
    ) -> tuple[messages.EngineMessages, PartTable[messages.ParameterCosts]]:
        """Return an engine's messages, and what they cost by model part."""
        layout = LayoutConfig(pp=pp, tp=degrees.tp, cp=degrees.cp, ep=degrees.ep)
        shards = self.memory.shards_by_part(pp, degrees.tp, degrees.ep)
        elements = [sum(math.prod(s.local) for s in layer.values()) for layer in shards.layers]
        stage_elements = sum(elements[kind] for kind in self.trace.layers) / pp
        engine_messages = messages.EngineMessages(
            engine, layout, degrees.dp, self.precision, self.machine, stage_elements
        )
        return engine_messages, shards.map(engine_messages.price)

    def timelines(
        self, grid: Grid, cuts: Cuts, layer_plans: Sequence[LayerPlan], *, every: bool = False
    ) -> list[Timeline]:
        """Return a rank's memory over a step, by stage, with `every` micro-batch or with as many as
        the peak needs."""
        ranks = grid.shape.dp * grid.layout.cp * grid.layout.tp
        choices = [(plan.reshard, plan.sequence) for plan in layer_plans]
        engine = apply_layer_choices(grid.engine, choices, ranks)
        rules = [plan.rule for plan in layer_plans]
        sequence = [plan.sequence for plan in layer_plans]
        return self.memory.timelines(grid, engine, cuts, rules, sequence, every=every)


def _select_split(grid: Grid, sequence: bool) -> Split:
    split = grid.shape.split
    return split.context_only if sequence else split


def _derive_degrees(grid: Grid, split: Split) -> tuple[int, Degrees]:
    """Return the number of stages, and the degrees where ranks share rows by `split`."""
    return grid.layout.pp, replace(grid.degrees, tp=split.tp, cp=split.cp)
