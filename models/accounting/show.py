"""Text for `headrace models show`: layers as a stripe, parameters, FLOPs, memory.

It renders a summary (`summary.py`) that may come from the cache: nothing here needs torch.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from ...console.progress import format_bytes, format_number
from .state import device_bytes

COLOURS = ("cyan", "yellow", "magenta", "green", "blue", "red", "white")
STRIPE = 64


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
    active = format_active(summary["parameters"], summary["active_parameters"])
    return f"{format_number(summary['parameters'])} parameters{active}: {layers} layers, {shape}"


def format_active(total: int, active: int) -> str:
    """Format the active parameters in brackets, if a token does not use all parameters."""
    return f" ({format_number(active)} active)" if active < total else ""


def stripe(layers: list[str]) -> str:
    """Draw a letter per layer, and a legend."""
    import click

    counts = Counter(layers)
    painted = {
        name: click.style(mark, fg=COLOURS[number % len(COLOURS)], bold=True)
        for number, (name, mark) in enumerate(choose_letters(layers).items())
    }
    lines = [
        f"{first:>5}  " + "".join(painted[name] for name in layers[first : first + STRIPE])
        for first in range(0, len(layers), STRIPE)
    ]
    legend = "  ".join(f"{painted[name]} {name} ×{count}" for name, count in counts.items())
    return "\n".join([*lines, f"       {legend}"])


def choose_letters(layers: list[str]) -> dict[str, str]:
    """Choose a letter from each layer's name, unique per kind if possible."""
    letters: dict[str, str] = {}
    for name in dict.fromkeys(layers):
        candidates = [letter.upper() for letter in name if letter.isalnum()] + [
            letter for letter in name if letter.isalnum()
        ]
        unused = [letter for letter in candidates if letter not in letters.values()]
        letters[name] = unused[0] if unused else "?"
    return letters


def parts_table(summary: dict[str, Any]) -> str:
    total = summary["parameters"]
    forward, step = summary["forward_flops_per_token"], summary["step_flops_per_token"]
    length = f"{summary['seq_len']:,}"
    lines = [
        f"{'':<20}{'parameters':>16}{'share':>8}{'forward':>12}{'generation':>12}",
    ]
    for name in dict.fromkeys([*summary["parameters_by_part"], *forward]):
        num_parameters = summary["parameters_by_part"].get(name, 0)
        tied = name == "head" and not num_parameters
        lines.append(
            f"{'head (tied)' if tied else name:<20}{num_parameters:>16,}"
            f"{num_parameters / total:>8.1%}"
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
        precision = f"bf16: {entry['reason']}" if entry["reason"] else "fp8"
        flops = metric(entry["forward_flops_per_token"])
        lines.append(f"{entry['matrix'] + count:<44}{flops:>12}  {precision}")
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
    for name in dict.fromkeys(category for unit in units for category in step[unit]):
        sizes = (format_bytes(step[unit].get(name, 0)) for unit in units)
        lines.append(f"{name:<20}" + "".join(f"{size:>14}" for size in sizes))
    totals = (format_bytes(device_bytes(step[unit])) for unit in units)
    lines.append(f"{'most of a step':<20}" + "".join(f"{size:>14}" for size in totals))
    lines.append(f"{'generation state':<20}{format_bytes(summary['generation_state']):>14}")
    batch = f"{summary['rows']} × {summary['seq_len']:,} tokens in {summary['precision']}"
    batch += f", {summary['threads']} thread" if summary["threads"] else ""
    layout = f"{summary['engine']}; {layout}"
    return "\n".join([*lines, f"For each rank at the highest moment of a step: {batch}; {layout}."])


def metric(number: float) -> str:
    """Format a number: 12_345_678 → '12.3M'."""
    for suffix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{suffix}"
    return f"{number:.3g}"
