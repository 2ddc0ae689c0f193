"""`headrace models show`: layers as a stripe, parameters, operations, memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Protocol, get_args

from ...console.progress import as_bytes, human
from .. import fp8
from ..config import ModelConfig
from ..model import Model
from ..options.precision import Precision
from ..options.recompute import Unit, rules_of
from .count import (
    TRAINING,
    active_parameters,
    build_meta,
    forward_flops,
    parameters,
    parameters_by_part,
    step_flops,
)
from .level import EngineState
from .memory import generation_bytes, rank_shards
from .passes import model_passes
from .shape import Shape
from .state import Degrees, Shards, device_bytes, state_bytes
from .step import Action, input_bytes, timeline

LADDER = (2048, 8192, 32768, 131072, 1048576)
COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "white")
STRIPE = 64


def describe(
    config: ModelConfig,
    seq_len: int,
    engine: EngineState,
    *,
    rows: int = 1,
    precision: Precision,
    degrees: Degrees,
) -> dict[str, Any]:
    """Return everything that is shown, as one JSON document."""
    model = build_meta(config)
    count, active = parameters(model), active_parameters(model)
    forward = forward_flops(model, seq_len)
    training = TRAINING * sum(forward.values())
    return {
        "layers": [str(layer) for layer in config.layers],
        "vocab_size": config.vocab_size,
        "width": config.width,
        "parameters": count,
        "active_parameters": active,
        "parameters_by_part": parameters_by_part(model),
        "seq_len": seq_len,
        "forward_flops_per_token": forward,
        "step_flops_per_token": step_flops(model, seq_len),
        "training_flops_per_token": training,
        "six_n_error": 6 * active / training - 1,
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
    """Return the bytes on one rank that trains `rows` sequences at once, and the bytes of one
    sequence in generation."""
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
        "state": state_bytes(engine.parts, shards, degrees),
        "step": {unit: step_memory(config, shape, engine, shards, unit) for unit in get_args(Unit)},
        "generation_state": generation_bytes(config, seq_len, precision=precision),
    }


def step_memory(
    config: ModelConfig, shape: Shape, engine: EngineState, shards: Shards, unit: Unit
) -> dict[str, int]:
    """Return the bytes of each part at the highest moment of a step of one micro-batch."""
    layers = len(config.layers)
    passes = model_passes(config, shape, rules_of(unit, layers))
    held = engine.memory(shards, shape.degrees)
    actions = [Action("forward", 0, 0), Action("backward", 0, 0)]
    return timeline(passes, held, actions, [range(layers)], input_bytes(shape)).parts


def lengths_row(model: Model, seq_len: int) -> dict[str, Any]:
    forward, step = forward_flops(model, seq_len), step_flops(model, seq_len)
    training = TRAINING * sum(forward.values())
    return {
        "training_flops_per_token": training,
        "step_flops_per_token": sum(step.values()),
        "six_n_error": 6 * active_parameters(model) / training - 1,
        "forward_flops_by_part": forward,
        "step_flops_by_part": step,
    }


def render(summary: dict[str, Any]) -> str:
    sections = [
        title(summary),
        stripe(summary["layers"]),
        parts_table(summary),
        lengths_table(summary),
    ]
    if summary["fp8"] is not None:
        sections.append(fp8_table(summary["fp8"]))
    return "\n\n".join([*sections, memory_table(summary["memory"])])


def title(summary: dict[str, Any]) -> str:
    layers = len(summary["layers"])
    shape = f"width {summary['width']:,}, vocabulary {summary['vocab_size']:,}"
    active = shown_active(summary["parameters"], summary["active_parameters"])
    return f"{human(summary['parameters'])} parameters{active}: {layers} layers, {shape}"


def shown_active(count: int, active: int) -> str:
    """Return the active parameters in brackets, where a token does not use all."""
    return f" ({human(active)} active)" if active < count else ""


def stripe(layers: list[str]) -> str:
    """Draw one letter for each layer, and a legend."""
    import click

    counts = Counter(layers)
    painted = {
        name: click.style(mark, fg=COLOURS[number % len(COLOURS)], bold=True)
        for number, (name, mark) in enumerate(letters_of(layers).items())
    }
    lines = [
        f"{first:>5}  " + "".join(painted[name] for name in layers[first : first + STRIPE])
        for first in range(0, len(layers), STRIPE)
    ]
    legend = "  ".join(f"{painted[name]} {name} ×{count}" for name, count in counts.items())
    return "\n".join([*lines, f"       {legend}"])


def letters_of(layers: list[str]) -> dict[str, str]:
    """Return a letter of its name for each kind of layer, unique if possible."""
    chosen: dict[str, str] = {}
    for name in dict.fromkeys(layers):
        letters = [c.upper() for c in name if c.isalnum()] + [c for c in name if c.isalnum()]
        free = [c for c in letters if c not in chosen.values()]
        chosen[name] = free[0] if free else "?"
    return chosen


def parts_table(summary: dict[str, Any]) -> str:
    total = summary["parameters"]
    forward, step = summary["forward_flops_per_token"], summary["step_flops_per_token"]
    length = f"{summary['seq_len']:,}"
    lines = [
        f"{'':<20}{'parameters':>16}{'share':>8}{'forward':>12}{'generation':>12}",
    ]
    for name in dict.fromkeys([*summary["parameters_by_part"], *forward]):
        count = summary["parameters_by_part"].get(name, 0)
        tied = name == "head" and not count
        lines.append(
            f"{'head (tied)' if tied else name:<20}{count:>16,}{count / total:>8.1%}"
            f"{metric(forward.get(name, 0)):>12}{metric(step.get(name, 0)):>12}"
        )
    lines.append(
        f"{'all':<20}{total:>16,}{'':>8}"
        f"{metric(sum(forward.values())):>12}{metric(sum(step.values())):>12}"
    )
    lines.append(f"FLOPs for each token, at {length} tokens; attention counts masked pairs too.")
    return "\n".join(lines)


def lengths_table(summary: dict[str, Any]) -> str:
    lines = [f"{'tokens':>20}{'training':>16}{'6N is off by':>16}{'generation':>16}"]
    for length, row in summary["by_seq_len"].items():
        training = row["training_flops_per_token"]
        error = row["six_n_error"]
        step = row["step_flops_per_token"]
        lines.append(f"{int(length):>20,}{metric(training):>16}{error:>+16.1%}{metric(step):>16}")
    lines.append(
        "FLOPs for each token by sequence length; training is three forward passes. "
        f"N: {summary['active_parameters']:,} active parameters."
    )
    return "\n".join(lines)


def fp8_table(summary: dict[str, Any]) -> str:
    lines = [f"{'matrices':<44}{'forward':>12}  precision"]
    for entry in [*summary["fp8"], *summary["bf16"]]:
        count = f" ×{entry['count']}" if entry["count"] > 1 else ""
        where = f"bf16: {entry['reason']}" if entry["reason"] else "fp8"
        flops = metric(entry["forward_flops_per_token"])
        lines.append(f"{entry['matrix'] + count:<44}{flops:>12}  {where}")
    lines.append(
        f"{summary['share']:.1%} of these FLOPs are in FP8 (e4m3). Gradients of weights stay in "
        f"bf16: {summary['training_share']:.1%} in training."
    )
    return "\n".join(lines)


def memory_table(summary: dict[str, Any]) -> str:
    layout = ", ".join(f"{name} {value}" for name, value in summary["layout"].items())
    step = summary["step"]
    units = list(step)
    lines = [f"{'recompute':<20}" + "".join(f"{unit:>14}" for unit in units)]
    for name in dict.fromkeys(part for unit in units for part in step[unit]):
        sizes = (as_bytes(step[unit].get(name, 0)) for unit in units)
        lines.append(f"{name:<20}" + "".join(f"{size:>14}" for size in sizes))
    totals = (as_bytes(device_bytes(step[unit])) for unit in units)
    lines.append(f"{'most of a step':<20}" + "".join(f"{size:>14}" for size in totals))
    lines.append(f"{'generation state':<20}{as_bytes(summary['generation_state']):>14}")
    what = f"{summary['rows']} × {summary['seq_len']:,} tokens in {summary['precision']}"
    what += f", {summary['threads']} thread" if summary["threads"] else ""
    layout = f"{summary['engine']}; {layout}"
    return "\n".join([*lines, f"For each rank at the highest moment of a step: {what}; {layout}."])


def metric(number: float) -> str:
    """Format a number: 12_345_678 → '12.3M'."""
    for suffix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"


class FindEngineState(Protocol):
    """Find the state of the engine that a run's `PATH.TO.KEY=VALUE` words configure. The engines
    live above this package, so the command that knows both hands this function down."""

    def __call__(
        self, words: Sequence[str], model: Model, precision: Precision, degrees: Degrees
    ) -> EngineState: ...
