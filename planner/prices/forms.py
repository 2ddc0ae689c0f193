"""How layers run in a layout: the form of a kind, its bytes, and its choices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from ...models.config.options.recompute import Rule
from ..division.problem import Choice
from ..memory.footprints import Footprint
from ..memory.part_memory import PartMemory
from ..traces.work import Parts, PassTimes
from .messages import EngineMessages, Reshard, Sharded


class Form(NamedTuple):
    """A layer of one kind as a layout runs it, before its own choices."""

    passes: PassTimes
    engine: EngineMessages
    shards: Sharded
    sequence: bool
    """True: the tensor ranks work as context ranks, with whole weights. Simulated only."""

    @property
    def forward(self) -> float:
        """Seconds of the forward pass."""
        return self.engine.forward(self.passes.forward_seconds, self.shards)

    @property
    def fastest(self) -> float:
        """Seconds of the backward pass of the fastest choice, which recomputes nothing."""
        return min(
            self.engine.backward(self.passes.backward_seconds, self.shards, gathers=reshard is None)
            for reshard in self.engine.reshards
        )

    @property
    def update(self) -> float:
        """Seconds of a step outside the passes."""
        return self.engine.update(
            self.passes.forward_seconds, self.passes.backward_seconds, self.shards
        )

    def beyond(self, forward: float, update: float, micro_batches: int) -> tuple[float, float]:
        """Return the seconds of the forward pass beyond those of the kind, and those of the update
        for each micro-batch."""
        return self.forward - forward, (self.update - update) / micro_batches


class Sizes(NamedTuple):
    """Bytes of a layer of one kind in a layout."""

    rules: Mapping[Rule, Footprint]
    useful: Sequence[Rule]
    """Rules that no other beats in everything."""
    state: PartMemory
    whole: PartMemory
    """With weights that stay whole from the forward to the backward pass."""
    early_gradients: bool
    """True if gradients exist while micro-batches are in flight."""


class Way(NamedTuple):
    """How a layer runs."""

    rule: Rule
    reshard: Reshard
    """False: weights stay gathered from the forward to the backward pass. None: as the engine."""
    passes: PassTimes
    engine: EngineMessages
    shards: Sharded
    sequence: bool = False
    """True: the tensor ranks work as context ranks, with whole weights. Simulated only."""
    later: float = 0.0
    """Seconds of the update beyond those of the kind, for each micro-batch."""

    @property
    def key(self) -> tuple[Rule, Reshard, bool]:
        """The choice, without its costs."""
        return self.rule, self.reshard, self.sequence

    @property
    def forward(self) -> Parts:
        """Seconds of the forward pass by part."""
        return self._with_messages(self.passes.forward, self.engine.forward)

    @property
    def backward(self) -> Parts:
        again = self.passes.recompute_seconds[self.rule] + self.engine.again(self.rule)
        back = dict(self.passes.backward, recompute=again)
        backward = partial(self.engine.backward, gathers=self.reshard is None)
        parts = self._with_messages(back, backward)
        return {**parts, "update": self.later} if self.later else parts

    def _with_messages(self, parts: Parts, price: Callable[[float, Sharded], float]) -> Parts:
        """Return the parts of a pass with its exposed messages, which computation does not hide."""
        busy = sum(parts.values())
        exposed = price(busy, self.shards) - busy
        return {**parts, "data": exposed} if exposed else parts


def choices(
    form: Form, sizes: Sizes, longer: float, delayed: float, rules: Sequence[Rule]
) -> Iterator[Choice]:
    """Yield the choices of a layer in one form. Its forward pass is `longer` than that of the kind,
    and its update `delayed` for each micro-batch."""
    cost, engine, shards, sequence = form
    costs = [
        (
            rule,
            cost.backward_seconds + cost.recompute_seconds[rule] + engine.again(rule),
            *sizes.rules[rule],
        )
        for rule in rules
    ]
    for reshard in engine.reshards:
        memory = sizes.state if reshard is None else sizes.whole
        passes = engine.backwards([back for _, back, *_ in costs], shards, gathers=reshard is None)
        for (rule, _, activations, workspace), seconds in zip(costs, passes, strict=True):
            yield Choice(
                name=Way(rule, reshard, cost, engine, shards, sequence, delayed),
                backward=seconds + longer + delayed,
                state=memory.step_bytes(activations, early_gradients=sizes.early_gradients),
                activations=activations,
                workspace=workspace + memory.gathered,
            )
