"""State of an engine as the memory accounting takes it (models/accounting/state.py)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...models.accounting.level import EngineMemory, EngineState, Level
from ...models.accounting.state import (
    BytesPerParameter,
    Degrees,
    Shards,
    StatePart,
    by_parameter,
    state_bytes,
)
from ...models.config.options.precision import Precision
from ..engines.config import StateOnDevice
from ..run.config import RunConfig
from .watched import WrappedMemory, watched

STATE_BYTES = 4
"""Bytes of one number of optimizer state: fp32 in every precision."""


@dataclass(frozen=True)
class ParameterState:
    """State of a model's parameters that does not depend on engine and layout."""

    names: frozenset[str]
    fp32: frozenset[str]
    """Parameters that stay in fp32."""
    states: Mapping[str, Sequence[str]]
    """States that the optimizer keeps of each parameter."""
    groups: Sequence[tuple[str, ...]]
    """Names of the parameters of each group that is trained."""
    frozen: frozenset[str] = frozenset()
    """Parameters that no step changes."""

    def optimizer_bytes(self, name: str) -> int:
        return STATE_BYTES * len(self.states[name])

    def packed(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {
            "names": sorted(self.names),
            "fp32": sorted(self.fp32),
            "states": dict(self.states),
            "groups": list(self.groups),
            "frozen": sorted(self.frozen),
        }

    @classmethod
    def unpacked(cls, packed: dict[str, Any]) -> ParameterState:
        return cls(
            frozenset(packed["names"]),
            frozenset(packed["fp32"]),
            {name: tuple(states) for name, states in packed["states"].items()},
            [tuple(group) for group in packed["groups"]],
            frozenset(packed.get("frozen", ())),
        )


def state_of(
    run: RunConfig, parameters: ParameterState, precision: Precision, device: str
) -> EngineState:
    """Return what the engine and the optimizer of a run hold of these parameters."""
    sharded = run.engine.state_layout(precision, parameters.optimizer_bytes, device, run.layout)
    trained = with_full_precision(sharded, parameters)
    held = StateOnDevice(
        parts=trained,
        precision=precision,
        layout=run.layout,
        device=device,
        fp32=parameters.fp32 - parameters.frozen,
        groups=parameters.groups,
    )
    frozen = frozen_parts(parameters.frozen, parameters.fp32, precision)
    parts = [*trained, *frozen]
    memory = with_frozen(partial(run.engine.memory, held), parameters.frozen, frozen)
    return EngineState(
        engine=run.engine.describe(),
        device=device,
        parts=parts,
        linear=run.engine.linear,
        memory=watched(memory, parts) if run.watch.layers is not None else memory,
    )


def with_full_precision(parts: Sequence[StatePart], parameters: ParameterState) -> list[StatePart]:
    """Return the parts of an engine's state, and those of the fp32 parameters beside it, which are
    whole on every rank (engines/outside/full_precision.py)."""
    fp32, frozen = parameters.fp32 - parameters.frozen, parameters.frozen
    if not parameters.fp32 | frozen:
        return list(parts)
    sizes: dict[str, BytesPerParameter] = {
        "masters": 4,
        "gradients": 4,
        "optimizer": parameters.optimizer_bytes,
    }
    return [
        *(replace(part, names=parameters.names - fp32 - frozen) for part in parts),
        *(
            StatePart(name=name, bytes_per_parameter=size, names=fp32)
            for name, size in sizes.items()
            if fp32
        ),
    ]


class FrozenMemory(WrappedMemory):
    """Events of an engine, beside frozen parameters."""

    def __init__(
        self, engine: EngineMemory, frozen: Collection[str], sizes: dict[str, int]
    ) -> None:
        """`sizes` are the bytes of the frozen parameters by part."""
        super().__init__(engine)
        self.frozen = frozen
        self.sizes = sizes

    def begin(self, level: Level) -> None:
        for part, size in self.sizes.items():
            level.add(part, size)
        self.engine.begin(level)

    def gradient(self, level: Level, name: str, size: int, *, last: bool) -> None:
        if name not in self.frozen:
            self.engine.gradient(level, name, size, last=last)


def frozen_parts(
    frozen: frozenset[str], fp32: frozenset[str], precision: Precision
) -> list[StatePart]:
    """Return the parts of frozen parameters: weights, whole on each rank; and, of those that they
    round, a share of the masters. `fp32` are those that are not rounded."""
    if not frozen:
        return []
    rounded = frozen - fp32
    parts = [StatePart(name="weights", bytes_per_parameter=precision.weight_bytes, names=rounded)]
    if precision.separate_masters:
        masters = partial(StatePart, name="masters", bytes_per_parameter=STATE_BYTES)
        shared = masters(names=rounded, sharded_over=("dp", "cp"), cut=by_parameter)
        parts += [shared, masters(names=frozen & fp32)]
    return parts


def with_frozen(
    memory: Callable[[Shards, Degrees], EngineMemory],
    frozen: frozenset[str],
    parts: Sequence[StatePart],
) -> Callable[[Shards, Degrees], EngineMemory]:
    """Return the events of an engine that trains the other parameters."""
    return partial(_with_frozen, memory, frozen, parts) if frozen else memory


def _with_frozen(
    memory: Callable[[Shards, Degrees], EngineMemory],
    frozen: frozenset[str],
    parts: Sequence[StatePart],
    shards: Shards,
    degrees: Degrees,
) -> EngineMemory:
    trained = {name: shard for name, shard in shards.items() if name not in frozen}
    sizes = state_bytes(parts, shards, degrees)
    return FrozenMemory(memory(trained, degrees), frozen, sizes)
