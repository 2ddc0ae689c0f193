"""How a layout can run a layer: forms by kind, bytes by recompute rule, and layer plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ...models.config.options.recompute import Rule
from ..division.problem import Choice
from ..memory.footprints import Footprint
from ..memory.part_memory import PartMemory
from ..traces.work import Parts, PassTimes
from .messages import EngineMessages, ParameterCosts, Reshard


class LayerForm(NamedTuple):
    """A layer kind as a layout runs it, before layers choose recompute and resharding."""

    passes: PassTimes
    engine: EngineMessages
    parameters: ParameterCosts
    sequence: bool
    """True: the tensor ranks work as context ranks, with whole weights. Simulated only."""

    @property
    def forward(self) -> float:
        """Seconds in the forward pass."""
        return self.engine.forward(self.passes.forward_seconds, self.parameters)

    @property
    def min_backward(self) -> float:
        """Seconds in the fastest backward pass, which recomputes nothing."""
        seconds = self.passes.backward_seconds
        return min(
            self.engine.backward(seconds, self.parameters, gathers=reshard is None)
            for reshard in self.engine.reshards
        )

    @property
    def update(self) -> float:
        """Seconds outside the passes, once per step."""
        return self.engine.update(
            self.passes.forward_seconds, self.passes.backward_seconds, self.parameters
        )


class LayerBytes(NamedTuple):
    """A layer kind's bytes in a layout."""

    footprints: Mapping[Rule, Footprint]
    useful_rules: Sequence[Rule]
    """Rules that no other dominates."""
    state: PartMemory
    unsharded_state: PartMemory
    """State if weights stay gathered from the forward to the backward pass."""
    early_gradients: bool
    """True if gradients exist while micro-batches are in flight."""


class LayerPlan(NamedTuple):
    """How a layer runs."""

    rule: Rule
    reshard: Reshard
    """False: weights stay gathered from the forward to the backward pass. None: as the engine."""
    passes: PassTimes
    engine: EngineMessages
    parameters: ParameterCosts
    sequence: bool = False
    """True: the tensor ranks work as context ranks, with whole weights. Simulated only."""
    extra_update: float = 0.0
    """Seconds per micro-batch by which the update exceeds the kind's shortest."""

    @property
    def key(self) -> tuple[Rule, Reshard, bool]:
        """The choice, without its costs."""
        return self.rule, self.reshard, self.sequence

    @property
    def forward(self) -> Parts:
        """Seconds by part."""
        return self._add_messages(self.passes.forward, self.engine.forward)

    @property
    def backward(self) -> Parts:
        recompute = self.passes.recompute_seconds[self.rule]
        recompute += self.engine.recompute_seconds(self.rule)
        busy = dict(self.passes.backward, recompute=recompute)
        price = partial(self.engine.backward, gathers=self.reshard is None)
        seconds = self._add_messages(busy, price)
        return {**seconds, "update": self.extra_update} if self.extra_update else seconds

    def _add_messages(self, busy: Parts, price: Callable[[float, ParameterCosts], float]) -> Parts:
        """Add the seconds in messages that computation does not hide."""
        busy_seconds = sum(busy.values())
        exposed = price(busy_seconds, self.parameters) - busy_seconds
        return {**busy, "data": exposed} if exposed else busy


def list_choices(
    form: LayerForm,
    sizes: LayerBytes,
    extra_forward: float,
    extra_update: float,
    rules: Sequence[Rule],
) -> Iterator[Choice]:
    """Yield a layer's choices in a form.

    The form's forward pass takes `extra_forward` seconds more than the kind's shortest, and its
    update `extra_update` seconds more per micro-batch.
    """
    passes, engine, parameters, sequence = form
    busy_seconds = [
        passes.backward_seconds + passes.recompute_seconds[rule] + engine.recompute_seconds(rule)
        for rule in rules
    ]
    for reshard in engine.reshards:
        memory = sizes.state if reshard is None else sizes.unsharded_state
        backward_passes = engine.backward_passes(busy_seconds, parameters, gathers=reshard is None)
        for rule, seconds in zip(rules, backward_passes, strict=True):
            activations, workspace = sizes.footprints[rule]
            yield Choice(
                name=LayerPlan(rule, reshard, passes, engine, parameters, sequence, extra_update),
                backward=seconds + extra_forward + extra_update,
                state=memory.step_bytes(activations, early_gradients=sizes.early_gradients),
                activations=activations,
                workspace=workspace + memory.gathered,
            )
