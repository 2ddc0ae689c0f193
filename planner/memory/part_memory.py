"""Sample a part's memory (a layer, an end or a shared module) from a step's timeline.

The search adds up these bytes over a stage's parts; floors bound a stage from below by them. The
part runs alone and without activations, for two micro-batches: the first pair of passes meets no
gradients, the second does.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...models.accounting.level import EngineMemory, EngineState, Level, Moment, Unit
from ...models.accounting.pieces import Passes, PassSegment
from ...models.accounting.state import Degrees, Shards, device_bytes
from ...models.accounting.step import Action, ChunkPart, timeline
from ...trainer.accounting.watched import WrappedMemory
from ...trainer.engines.shard_groups import parse_layer_number
from ...trainer.engines.traffic import UnshardedWeights

BUFFERS = "buffers"
STEP = [action for n in (0, 1) for action in (Action("forward", 0, n), Action("backward", 0, n))]


class PartMemory(NamedTuple):
    """A part's device bytes at moments in a step: state, gathered weights and gradients.

    Buffers are left out, because they do not add up over parts.
    """

    in_flight: int
    """While micro-batches are in flight, before any gradient."""
    between: int
    """After any backward pass but the last."""
    end: int
    """After the last backward pass."""
    in_flight_later: int
    """While micro-batches are in flight, with gradients from earlier ones."""
    gathered: int
    """Weights that a backward pass gathers at its start."""

    def step_bytes(self, activations: float, *, early_gradients: bool) -> float:
        """Return the bytes that the search adds up over a stage's parts.

        Without `early_gradients`, as in GPipe, a part frees a micro-batch's `activations` (bytes)
        before it allocates gradients: only the excess counts.
        """
        gradients = self.in_flight_later - self.in_flight
        excess = gradients if early_gradients else max(0.0, gradients - activations)
        return self.in_flight + excess


def sample_part(
    state: EngineState,
    shards: Shards,
    degrees: Degrees,
    unsharded: UnshardedWeights,
    weight_bytes: int,
) -> PartMemory:
    """Sample the part that has these shards; parameters take `weight_bytes` per element."""
    if not shards:
        return PartMemory(0, 0, 0, 0, 0)
    layer = parse_layer_number(next(iter(shards)))
    gradients = tuple(
        PassSegment(0, 0, name, math.prod(shard.local) * weight_bytes)
        for name, shard in shards.items()
    )
    probe = _GatherProbe(state.memory(shards, degrees))
    moments = timeline([[ChunkPart("", layer, Passes((), gradients))]], probe, STEP).moments
    # A forward pass has one moment. A backward pass has two: the part's and the pass's end.
    start, forward, _, between, later_forward, _, end, _ = map(_lasting_bytes, moments)
    is_unsharded = unsharded.outside if layer is None else unsharded.blocks
    return PartMemory(
        in_flight=forward if is_unsharded else start,
        between=between,
        end=end,
        in_flight_later=later_forward if is_unsharded else between,
        gathered=probe.gathered,
    )


def _lasting_bytes(moment: Moment) -> int:
    return device_bytes(moment.end) - moment.end.get(BUFFERS, 0)


class _GatherProbe(WrappedMemory):
    """Forwards an engine's events, and measures what a backward pass gathers at its start."""

    def __init__(self, engine: EngineMemory) -> None:
        super().__init__(engine)
        self.gathered = 0

    def enter(self, level: Level, unit: Unit, *, backward: bool) -> None:
        before = level.total
        super().enter(level, unit, backward=backward)
        self.gathered = self.gathered + level.total - before if backward else 0
