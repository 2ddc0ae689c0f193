"""Summary that `headrace models show` prints, counted from the built and traced model, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol, get_args

from ..config.config import ModelConfig
from ..config.options.precision import Precision
from ..config.options.recompute import Unit, expand_rules
from ..model.model import Model
from ..transforms import fp8
from .count import (
    TRAINING,
    build_meta,
    count_active_parameters,
    count_parameters,
    count_parameters_by_part,
    forward_flops,
    step_flops,
)
from .level import EngineState
from .memory import generation_bytes, rank_shards
from .passes import model_passes
from .shape import Shape
from .state import Degrees, Shards, state_bytes
from .step import Action, cut_passes, input_bytes, timeline

LADDER = (2048, 8192, 32768, 131072, 1048576)
"""Sequence lengths in the FLOPs table."""


class FindEngineState(Protocol):
    """Find the engine state that a run's `PATH.TO.KEY=VALUE` words configure. Engines live above
    this package, so the command that knows both passes this function."""

    def __call__(
        self, words: Sequence[str], model: Model, precision: Precision, degrees: Degrees
    ) -> EngineState: ...


def describe(
    config: ModelConfig,
    seq_len: int,
    engine: EngineState,
    *,
    rows: int = 1,
    precision: Precision,
    degrees: Degrees,
) -> dict[str, Any]:
    """Return the summary as a JSON document."""
    model = build_meta(config)
    num_parameters, num_active = count_parameters(model), count_active_parameters(model)
    forward = forward_flops(model, seq_len)
    training_flops = TRAINING * sum(forward.values())
    return {
        "layers": [str(layer) for layer in config.layers],
        "vocab_size": config.vocab_size,
        "width": config.width,
        "parameters": num_parameters,
        "active_parameters": num_active,
        "parameters_by_part": count_parameters_by_part(model),
        "seq_len": seq_len,
        "forward_flops_per_token": forward,
        "step_flops_per_token": step_flops(model, seq_len),
        "training_flops_per_token": training_flops,
        "six_n_error": 6 * num_active / training_flops - 1,
        "by_seq_len": {str(length): lengths_row(model, length) for length in LADDER},
        "fp8": fp8.summary(model, precision.fp8) if precision.fp8 else None,
        "memory": memory(config, seq_len, engine, rows=rows, precision=precision, degrees=degrees),
    }


def memory(
    config: ModelConfig,
    seq_len: int,
    engine: EngineState,
    *,
    rows: int,
    precision: Precision,
    degrees: Degrees,
) -> dict[str, Any]:
    """Count a rank's bytes when it trains `rows` sequences at once, and a sequence's bytes in
    generation."""
    shards = rank_shards(config, degrees, degrees.tp - 1)  # the last rank has the most
    shape = Shape(
        rows=rows,
        seq_len=seq_len,
        precision=precision,
        degrees=degrees,
        device=engine.device,
        linear=engine.linear,
    )
    return {
        "precision": precision.name,
        "rows": rows,
        "seq_len": seq_len,
        "threads": shape.threads if shape.device == "cpu" else None,
        "engine": engine.engine,
        "layout": asdict(degrees),
        "state": state_bytes(engine.state_parts, shards, degrees),
        "step": {unit: step_memory(config, shape, engine, shards, unit) for unit in get_args(Unit)},
        "generation_state": generation_bytes(config, seq_len, precision=precision),
    }


def step_memory(
    config: ModelConfig, shape: Shape, engine: EngineState, shards: Shards, unit: Unit
) -> dict[str, int]:
    """Count bytes by category at the peak of a single-micro-batch step."""
    num_layers = len(config.layers)
    passes = model_passes(config, shape, expand_rules(unit, num_layers))
    engine_memory = engine.memory(shards, shape.degrees)
    actions = [Action("forward", 0, 0), Action("backward", 0, 0)]
    chunks = cut_passes(passes, [range(num_layers)])
    return timeline(chunks, engine_memory, actions, input_bytes(shape)).parts


def lengths_row(model: Model, seq_len: int) -> dict[str, Any]:
    forward, step = forward_flops(model, seq_len), step_flops(model, seq_len)
    training = TRAINING * sum(forward.values())
    return {
        "training_flops_per_token": training,
        "step_flops_per_token": sum(step.values()),
        "six_n_error": 6 * count_active_parameters(model) / training - 1,
        "forward_flops_by_part": forward,
        "step_flops_by_part": step,
    }
