"""Build the state of an engine for the memory accounting (models/accounting/state.py)."""

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
    cut_parameters,
    state_bytes,
)
from ...models.config.options.precision import Precision
from ..engines.config import StateOnDevice
from ..run.config import RunConfig
from .watched import WrappedMemory, add_watched_masters

STATE_BYTES = 4
"""Bytes of a number of optimizer state: fp32 in every precision."""


@dataclass(frozen=True)
class ParameterState:
    """The state of a model's parameters, independent of engine and layout."""

    names: frozenset[str]
    fp32: frozenset[str]
    """Parameters that stay in fp32."""
    states: Mapping[str, Sequence[str]]
    """Optimizer states by parameter."""
    groups: Sequence[tuple[str, ...]]
    """Parameter names by trained group."""
    frozen: frozenset[str] = frozenset()
    """Parameters without updates."""

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


def build_engine_state(
    run: RunConfig, parameters: ParameterState, precision: Precision, device: str
) -> EngineState:
    """Return the state that the run's engine and optimizer hold for these parameters."""
    sharded = run.engine.state_layout(precision, parameters.optimizer_bytes, device, run.layout)
    trained = add_full_precision(sharded, parameters)
    device_state = StateOnDevice(
        parts=trained,
        precision=precision,
        layout=run.layout,
        device=device,
        fp32=parameters.fp32 - parameters.frozen,
        groups=parameters.groups,
    )
    frozen = frozen_parts(parameters.frozen, parameters.fp32, precision)
    parts = [*trained, *frozen]
    memory = add_frozen_memory(partial(run.engine.memory, device_state), parameters.frozen, frozen)
    return EngineState(
        engine=run.engine.describe(),
        device=device,
        parts=parts,
        linear=run.engine.linear,
        memory=add_watched_masters(memory, parts) if run.watch.layers is not None else memory,
    )


def add_full_precision(parts: Sequence[StatePart], parameters: ParameterState) -> list[StatePart]:
    """Return the parts of an engine's state, and the parts of the fp32 parameters.

    The latter live outside the engine and are replicated on every rank
    (engines/outside/full_precision.py).
    """
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
    """An engine's memory events, and the bytes of frozen parameters."""

    def __init__(
        self, engine: EngineMemory, frozen: Collection[str], sizes: dict[str, int]
    ) -> None:
        """`sizes` are the frozen parameters' bytes by part."""
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
    """Return the state of frozen parameters: replicated weights, and sharded masters of the
    rounded ones. `fp32` parameters are not rounded."""
    if not frozen:
        return []
    rounded = frozen - fp32
    parts = [StatePart(name="weights", bytes_per_parameter=precision.weight_bytes, names=rounded)]
    if precision.separate_masters:
        masters = partial(StatePart, name="masters", bytes_per_parameter=STATE_BYTES)
        sharded = masters(names=rounded, sharded_over=("dp", "cp"), cut=cut_parameters)
        parts += [sharded, masters(names=frozen & fp32)]
    return parts


def add_frozen_memory(
    memory: Callable[[Shards, Degrees], EngineMemory],
    frozen: frozenset[str],
    parts: Sequence[StatePart],
) -> Callable[[Shards, Degrees], EngineMemory]:
    """Return the memory events of an engine that trains the parameters that are not frozen."""
    return partial(_frozen_memory, memory, frozen, parts) if frozen else memory


def _frozen_memory(
    memory: Callable[[Shards, Degrees], EngineMemory],
    frozen: frozenset[str],
    parts: Sequence[StatePart],
    shards: Shards,
    degrees: Degrees,
) -> EngineMemory:
    trained = {name: shard for name, shard in shards.items() if name not in frozen}
    sizes = state_bytes(parts, shards, degrees)
    return FrozenMemory(memory(trained, degrees), frozen, sizes)
