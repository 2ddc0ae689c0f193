"""State of the parameters of a built model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from ...console.errors import ConfigError, Problem
from ...models.accounting.level import EngineState
from ...models.accounting.state import Degrees
from ...models.config.options.precision import Precision
from ...models.model.model import Model
from ..checkpoints.kinds import AVERAGE
from ..engines.groups import kept_states, parameter_groups
from ..engines.optimizers.base import ParameterGroup
from ..layout.devices import choose_device
from ..run import config as run_config
from ..run.config import RunConfig
from .state import ParameterState, state_of

SECTIONS = ("engine", "optimizer", "device")
"""Keys of a run that decide its state; precision and degrees have options of their own."""


def parameter_state(run: RunConfig, model: Model, precision: Precision) -> ParameterState:
    fp32 = frozenset(model.full_precision(precision))
    names = frozenset(name for name, _ in model.named_parameters())
    averaged = run.optimizer.ema is not None
    groups = _groups(run, model, fp32)
    if not groups:  # modules that are not ours are one group
        average = (AVERAGE,) if averaged else ()
        states = {name: (*held, *average) for name, held in run.optimizer.states(model).items()}
        return ParameterState(names, fp32, states, [tuple(states)], frozenset())
    frozen = frozenset(name for group in groups if group.frozen for name in group.names)
    return ParameterState(
        names,
        fp32,
        kept_states(groups, averaged=averaged),
        [group.names for group in groups if not group.frozen],
        frozen,
    )


def _groups(run: RunConfig, model: nn.Module, fp32: frozenset[str]) -> Sequence[ParameterGroup]:
    """Return the parameter groups of a model; none of modules that are not ours."""
    return parameter_groups(model, run.optimizer, fp32) if isinstance(model, Model) else ()


def engine_state(run: RunConfig, model: Model, precision: Precision, device: str) -> EngineState:
    """Return what the engine and the optimizer of a run hold of a model."""
    return state_of(run, parameter_state(run, model, precision), precision, device)


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
