"""Build an engine's state for the memory accounting (models/accounting/state.py)."""

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
"""Bytes per number in optimizer state: fp32 in every precision."""


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

    def optimizer_bytes(self, parameter: str) -> int:
        return STATE_BYTES * len(self.states[parameter])

    def pack(self) -> dict[str, Any]:
        """Convert the state to JSON."""
        return {
            "names": sorted(self.names),
            "fp32": sorted(self.fp32),
            "states": dict(self.states),
            "groups": list(self.groups),
            "frozen": sorted(self.frozen),
        }

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> ParameterState:
        return cls(
            frozenset(packed["names"]),
            frozenset(packed["fp32"]),
            {parameter: tuple(states) for parameter, states in packed["states"].items()},
            [tuple(group) for group in packed["groups"]],
            frozenset(packed.get("frozen", ())),
        )


def build_engine_state(
    run: RunConfig, parameters: ParameterState, precision: Precision, device: str, ranks: int
) -> EngineState:
    """Build the state that the run's engine and optimizer need for these parameters, where `ranks`
    ranks share it (dp × cp)."""
    engine = run.engine.for_ranks(ranks)
    sharded = engine.state_layout(precision, parameters.optimizer_bytes, device, run.layout)
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
    state = [*trained, *frozen]
    memory = add_frozen_memory(partial(engine.memory, device_state), parameters.frozen, frozen)
    return EngineState(
        engine=engine.describe(),
        device=device,
        state_parts=state,
        linear=engine.linear,
        memory=add_watched_masters(memory, state) if run.watch.layers is not None else memory,
    )


def add_full_precision(
    engine_state: Sequence[StatePart], parameters: ParameterState
) -> list[StatePart]:
    """Add the state of fp32 parameters to an engine's.

    They live outside the engine and are replicated on every rank
    (engines/outside/full_precision.py).
    """
    fp32, frozen = parameters.fp32 - parameters.frozen, parameters.frozen
    if not parameters.fp32 | frozen:
        return list(engine_state)
    sizes: dict[str, BytesPerParameter] = {
        "masters": 4,
        "gradients": 4,
        "optimizer": parameters.optimizer_bytes,
    }
    return [
        *(replace(part, names=parameters.names - fp32 - frozen) for part in engine_state),
        *(
            StatePart(name=kind, bytes_per_parameter=size, names=fp32)
            for kind, size in sizes.items()
            if fp32
        ),
    ]


class FrozenMemory(WrappedMemory):
    """An engine's memory events, and the bytes in frozen parameters."""

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
    """Build the state for frozen parameters: replicated weights, and sharded masters where weights
    are rounded. `fp32` parameters are not rounded."""
    if not frozen:
        return []
    rounded = frozen - fp32
    weights = StatePart(name="weights", bytes_per_parameter=precision.weight_bytes, names=rounded)
    if not precision.separate_masters:
        return [weights]
    masters = partial(StatePart, name="masters", bytes_per_parameter=STATE_BYTES)
    sharded = masters(names=rounded, sharded_over=("dp", "cp"), cut=cut_parameters)
    return [weights, sharded, masters(names=frozen & fp32)]


def add_frozen_memory(
    memory: Callable[[Shards, Degrees], EngineMemory],
    frozen: frozenset[str],
    parts: Sequence[StatePart],
) -> Callable[[Shards, Degrees], EngineMemory]:
    """Add frozen parameters to the memory events of an engine that trains all further ones."""
    return partial(_frozen_memory, memory, frozen, parts) if frozen else memory


def _frozen_memory(
    memory: Callable[[Shards, Degrees], EngineMemory],
    frozen: frozenset[str],
    parts: Sequence[StatePart],
    shards: Shards,
    degrees: Degrees,
) -> EngineMemory:
    trained = {parameter: shards[parameter] for parameter in shards if parameter not in frozen}
    sizes = state_bytes(parts, shards, degrees)
    return FrozenMemory(memory(trained, degrees), frozen, sizes)
