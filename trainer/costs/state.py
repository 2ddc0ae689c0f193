"""State of an engine as the memory accounting takes it (models/accounting/state.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...models.accounting.level import EngineState
from ...models.accounting.state import BytesPerParameter, StatePart
from ...models.options.precision import Precision
from ..engines.config import StateOnDevice
from ..run.config import RunConfig
from .frozen import frozen_parts, with_frozen
from .watched import watched

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
    whole on every rank (engines/full_precision.py)."""
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
