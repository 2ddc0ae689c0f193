"""Count the optimizer and engine state that a built model needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from ...console.errors import ConfigError, ConfigProblem
from ...models.accounting.level import EngineState
from ...models.accounting.state import Degrees
from ...models.config.options.precision import Precision
from ...models.model.model import Model
from ..checkpoints.kinds import AVERAGE
from ..engines.groups import parameter_groups, state_names
from ..engines.optimizers.base import ParameterGroup
from ..layout.devices import choose_device
from ..run import config as run_config
from ..run.config import RunConfig
from .state import ParameterState, build_engine_state

SECTIONS = ("engine", "optimizer", "device")
"""Keys in run.yaml that decide the state; precision and degrees are separate options."""


def parameter_state(run: RunConfig, model: Model, precision: Precision) -> ParameterState:
    """Return the state of the model's parameters under the run's optimizer."""
    fp32 = frozenset(model.full_precision(precision))
    names = frozenset(dict(model.named_parameters()))
    averaged = run.optimizer.ema is not None
    groups = _groups(run, model, fp32)
    if not groups:  # a foreign module is a single group
        average = (AVERAGE,) if averaged else ()
        states = {
            parameter: (*kinds, *average)
            for parameter, kinds in run.optimizer.states(model).items()
        }
        return ParameterState(names, fp32, states, [tuple(states)], frozenset())
    frozen = frozenset(name for group in groups if group.frozen for name in group.names)
    return ParameterState(
        names,
        fp32,
        state_names(groups, averaged=averaged),
        [group.names for group in groups if not group.frozen],
        frozen,
    )


def _groups(run: RunConfig, model: nn.Module, fp32: frozenset[str]) -> Sequence[ParameterGroup]:
    """Return a headrace model's parameter groups; none for foreign modules."""
    return parameter_groups(model, run.optimizer, fp32) if isinstance(model, Model) else ()


def engine_state(
    run: RunConfig, model: Model, precision: Precision, device: str, ranks: int
) -> EngineState:
    """Return the state that the run's engine and optimizer hold for a model, where `ranks` ranks
    share it (dp × cp)."""
    parameters = parameter_state(run, model, precision)
    return build_engine_state(run, parameters, precision, device, ranks)


def find_engine_state(
    words: Sequence[str], model: Model, precision: Precision, degrees: Degrees
) -> EngineState:
    """Return the state for `headrace models show`, from overrides such as `engine.zero=3`."""
    keys = [word.split("=")[0] for word in words]
    unsupported = [key for key in keys if key.split(".")[0] not in SECTIONS]
    if unsupported:
        raise ConfigError(
            "--run",
            [ConfigProblem(key, f"is not of {', '.join(SECTIONS)}") for key in unsupported],
        )
    run = run_config.build({}, words, source="the command line")
    layout = replace(run.layout, tp=degrees.tp, cp=degrees.cp, ep=degrees.ep)
    run.engine.check(layout, degrees.dp * degrees.tp * degrees.cp, precision)
    device = choose_device("auto") if run.device == "auto" else run.device
    return engine_state(run, model, precision, device, degrees.dp * degrees.cp)
