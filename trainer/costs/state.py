"""State of an engine as the memory accounting takes it (models/accounting/state.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from ...console.errors import ConfigError, Problem
from ...models.accounting.level import EngineMemory, EngineState
from ...models.accounting.state import BytesPerParameter, Degrees, Shards, StatePart
from ...models.model import Model
from ...models.options.precision import Precision
from ..engines.config import StateOnDevice
from ..engines.groups import parameter_groups
from ..layout.devices import choose_device
from ..run import config as run_config
from ..run.config import RunConfig
from .watched import watched

SECTIONS = ("engine", "optimizer", "device")
"""Keys of a run that decide its state; precision and degrees have options of their own."""
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
    """Names of the parameters of each group."""

    def optimizer_bytes(self, name: str) -> int:
        return STATE_BYTES * len(self.states[name])


def parameter_state(run: RunConfig, model: Model, precision: Precision) -> ParameterState:
    fp32 = frozenset(model.full_precision(precision))
    names = frozenset(name for name, _ in model.named_parameters())
    return ParameterState(names, fp32, run.optimizer.kept(model), _groups(run, model, fp32))


def engine_state(run: RunConfig, model: Model, precision: Precision, device: str) -> EngineState:
    """Return what the engine and the optimizer of a run hold of a model."""
    return state_of(run, parameter_state(run, model, precision), precision, device)


def state_of(
    run: RunConfig, parameters: ParameterState, precision: Precision, device: str
) -> EngineState:
    """Return what the engine and the optimizer of a run hold of these parameters."""
    sharded = run.engine.state_layout(precision, parameters.optimizer_bytes, device, run.layout)
    parts = with_full_precision(sharded, parameters)
    held = StateOnDevice(
        parts=parts,
        precision=precision,
        layout=run.layout,
        device=device,
        fp32=parameters.fp32,
        groups=parameters.groups,
    )
    memory: Callable[[Shards, Degrees], EngineMemory] = partial(run.engine.memory, held)
    return EngineState(
        engine=run.engine.describe(),
        device=device,
        parts=parts,
        memory=watched(memory, parts) if run.watch.layers is not None else memory,
    )


def _groups(run: RunConfig, model: nn.Module, fp32: frozenset[str]) -> list[tuple[str, ...]]:
    """Return the names of the parameters of each group; modules that are not ours are one group."""
    if not isinstance(model, Model):
        return [tuple(name for name, _ in model.named_parameters())]
    return [group.names for group in parameter_groups(model, run.optimizer, fp32)]


def with_full_precision(parts: Sequence[StatePart], parameters: ParameterState) -> list[StatePart]:
    """Return the parts of an engine's state, and those of the fp32 parameters beside it, which are
    whole on every rank (engines/full_precision.py)."""
    fp32 = parameters.fp32
    if not fp32:
        return list(parts)
    sizes: dict[str, BytesPerParameter] = {
        "masters": 4,
        "gradients": 4,
        "optimizer": parameters.optimizer_bytes,
    }
    return [
        *(replace(part, names=parameters.names - fp32) for part in parts),
        *(
            StatePart(name=name, bytes_per_parameter=size, names=fp32)
            for name, size in sizes.items()
        ),
    ]


def find_engine_state(
    words: Sequence[str], model: Model, precision: Precision, degrees: Degrees
) -> EngineState:
    """Return the state for `headrace models show`, from words such as `engine.zero=3`."""
    others = [word for word in words if word.split("=")[0].split(".")[0] not in SECTIONS]
    if others:
        raise ConfigError(
            "--run",
            [Problem(word.split("=")[0], f"is not of {', '.join(SECTIONS)}") for word in others],
        )
    run = run_config.build({}, words, source="the command line")
    layout = replace(run.layout, tp=degrees.tp, cp=degrees.cp, ep=degrees.ep)
    run.engine.check(layout, degrees.dp * degrees.tp * degrees.cp, precision)
    device = choose_device("auto") if run.device == "auto" else run.device
    return engine_state(run, model, precision, device)
