"""Find the longest rows that trained a model.

A run may continue another run, or begin with a folder from another program. The longest rows of all
of them count: a model that has learnt from long rows keeps their positions.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...console import config as reader
from ...console.errors import UserError
from ...dataplane.order.plan import Plan
from ..folders.folder import RunFolder
from .source import Checkpoint, WeightSource, find

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig
    from ...models.config.options.base import OperatorOptions


def set_trained_length(source: WeightSource) -> ModelConfig:
    """Return the weights' model with its longest row as the rotary positions' original length.

    Scaled positions do not change: they were computed from the length in the configuration.
    """
    model, length = source.model, trained_length(source)
    if length is None:
        return model

    def set_length(options: OperatorOptions) -> OperatorOptions:
        rope: Any = getattr(options, "rope", None)
        if rope is None or rope.scaling != "none":
            return options
        changes: dict[str, Any] = {"rope": replace(rope, original_length=length)}
        return replace(options, **changes)

    operators = {operator: set_length(options) for operator, options in model.operators.items()}
    return replace(model, operators=operators)


def trained_length(source: WeightSource) -> int | None:
    """Return the longest row in tokens; None if a run in the weights' past cannot be read."""
    if not isinstance(source, Checkpoint):
        return max_positions(source.model)
    if source.run is None or not source.run.begun:
        return None
    try:
        return _longest_row(source.run, source.step)
    except (UserError, _Unknown):
        return None


def max_positions(model: ModelConfig) -> int | None:
    """Return the number of positions in a model's configuration; None if it states none."""
    ropes: list[Any] = [getattr(options, "rope", None) for options in model.operators.values()]
    lengths = [int(rope.original_length * rope.factor) for rope in ropes if rope is not None]
    return max(lengths, default=model.learned_positions)


class _Unknown(Exception):
    """An earlier run, or its rows, cannot be found."""


def _longest_row(run: RunFolder, step: int) -> int:
    """Return the longest row in tokens before `step`, in a run and the runs that it continues."""
    data, _ = reader.read_yaml(run.run)
    if (synthetic := data.get("synthetic")) is not None:
        lengths = [int(synthetic["seq_len"])]
    else:
        plan = Plan.load(run.plan)
        lengths = [phase.seq_len for phase in plan.phases if phase.first_step < step]
        if plan.parent is not None:
            lengths.append(_longest_row(RunFolder(plan.parent.run), plan.first_step))
    if (origin := data.get("init_from")) is not None:
        initial_length = trained_length(find(origin["path"], origin.get("step")))
        if initial_length is None:
            raise _Unknown
        lengths.append(initial_length)
    if not lengths:
        raise _Unknown
    return max(lengths)
