"""Scores of a run's checkpoints: a line of `scores.jsonl` or `recall.jsonl` for each evaluation."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

from ...console.errors import InputError
from ...dataplane.order.plan import Plan
from ...dataplane.runlog import writer as lines
from ..checkpoints import store as checkpoints
from ..folders.folder import RunFolder
from ..weights.source import Checkpoint, WeightSource
from .config import ScoresConfig
from .missing import Missing, missing

LENGTH = 2048
"""Tokens of the context of weights without a run, as in the harness."""
ERROR = "_stderr"


def context_length(source: WeightSource, asked: int | None) -> int:
    """Return the tokens of the longest context: by default, those of the run's longest row."""
    if asked is not None:
        check_length(source, asked, "--max-length")
        return asked
    run = source.run if isinstance(source, Checkpoint) else None
    usual = LENGTH
    if run is not None and run.plan.exists():
        usual = max(phase.seq_len for phase in Plan.load(run.plan).phases)
    return min(usual, source.model.learned_positions or usual)


def check_length(source: WeightSource, length: int, option: str) -> None:
    most = source.model.learned_positions
    if most and length > most:
        raise InputError(
            f"{option} {length:,} is more than the model's {most:,} learned positions",
            hint=f"{option} {most}",
        )


def store(source: WeightSource, name: str, entry: dict[str, Any]) -> str | None:
    """Append an evaluation to a file of the run. Returns the file's path; None for weights that no
    run saved."""
    if not isinstance(source, Checkpoint) or source.run is None:
        return None
    path = source.run.root / name
    writer = lines.LineWriter(path)
    try:
        writer.write({"step": source.step, "time": time.time(), **entry})
        writer.sync()
    finally:
        writer.close()
    return str(path)


def entries(folder: RunFolder) -> list[dict[str, Any]]:
    """Return the evaluations of a run's checkpoints."""
    return list(lines.read(folder.scores)) if folder.scores.exists() else []


def missing_of(folder: RunFolder, config: ScoresConfig | None, last_step: int) -> list[Missing]:
    """Return the scores that are missing of a run, as its folder shows it."""
    saved = checkpoints.reached(folder.checkpoints, last_step)
    if config is None:
        return missing((), entries(folder), None)
    last = last_step if saved else None
    return missing(config.tasks, entries(folder), last, limit=config.limit, ema=config.ema)


def values(entry: dict[str, Any]) -> dict[tuple[str, str], str]:
    """Return the scores of an evaluation as text, by task and metric; with a standard error where
    the harness gives one. Metrics of a part of the documents, and of the moving average of the
    weights, are marked."""
    found = {}
    for task, result in entry["tasks"].items():
        for metric, value in result["metrics"].items():
            name, _, filter = metric.partition(",")
            if name.endswith(ERROR):
                continue
            error = result["metrics"].get(f"{name}{ERROR},{filter}")
            shown = (name if filter == "none" else f"{name} ({filter})") + mark(entry)
            found[task, shown] = _number(value) + (f" ± {error:.2g}" if error is not None else "")
    return found


def recalled(entry: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the share of right answers of a measurement of recall as text, by task and length."""
    for task, results in entry["tasks"].items():
        for each in results:
            metric = f"right answers, {each['length']:,} tokens{mark(entry)}"
            yield task, metric, f"{each['accuracy']:.2%}"


def mark(entry: dict[str, Any]) -> str:
    """Return the mark of results of a part of the documents, and of those of the moving average of
    the weights: they are other results than those without it."""
    part = f", limit {entry['limit']:,}" if entry.get("limit") else ""
    return part + (", ema" if entry.get("ema") else "")


def _number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:,.1f}"
