"""Store and format evaluations: lines of `scores.jsonl` and `recall.jsonl`."""

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
from .missing import ScoreGap, find_gaps

LENGTH = 2048
"""Context in tokens for weights without a run, as in the harness."""
ERROR = "_stderr"


def context_length(source: WeightSource, max_length: int | None) -> int:
    """Return the longest context in tokens: by default, the run's longest row."""
    if max_length is not None:
        check_length(source, max_length, "--max-length")
        return max_length
    run = source.run if isinstance(source, Checkpoint) else None
    length = LENGTH
    if run is not None and run.plan.exists():
        length = max(phase.seq_len for phase in Plan.load(run.plan).phases)
    return min(length, source.model.learned_positions or length)


def check_length(source: WeightSource, length: int, option: str) -> None:
    """Raise if the model has fewer learned positions than `length`."""
    max_length = source.model.learned_positions
    if max_length and length > max_length:
        raise InputError(
            f"{option} {length:,} is more than the model's {max_length:,} learned positions",
            hint=f"{option} {max_length}",
        )


def store(source: WeightSource, file_name: str, entry: dict[str, Any]) -> str | None:
    """Append an evaluation to a file in the run's folder. Return the file's path; None for weights
    without a run."""
    if not isinstance(source, Checkpoint) or source.run is None:
        return None
    path = source.run.root / file_name
    writer = lines.LineWriter(path)
    try:
        writer.write({"step": source.step, "time": time.time(), **entry})
        writer.sync()
    finally:
        writer.close()
    return str(path)


def read_entries(folder: RunFolder) -> list[dict[str, Any]]:
    """Read the evaluations on the harness's tasks."""
    return list(lines.read(folder.scores)) if folder.scores.exists() else []


def read_gaps(folder: RunFolder, config: ScoresConfig | None, last_step: int) -> list[ScoreGap]:
    """Find the missing scores of the run in a folder."""
    if config is None:
        return find_gaps((), read_entries(folder), None)
    saved_step = last_step if checkpoints.reached(folder.checkpoints, last_step) else None
    return find_gaps(
        config.tasks, read_entries(folder), saved_step, limit=config.limit, ema=config.ema
    )


def format_scores(entry: dict[str, Any]) -> dict[tuple[str, str], str]:
    """Format an evaluation's scores by task and metric, with the standard error where the harness
    gives one, and with `format_conditions`."""
    return {(task, metric): text for task, metric, text, _ in list_scores(entry)}


def list_scores(entry: dict[str, Any]) -> Iterator[tuple[str, str, str, float | None]]:
    """Yield the task, the metric, and the score as text and as a number."""
    for task, result in entry["tasks"].items():
        for key, value in result["metrics"].items():
            metric, _, filter = key.partition(",")
            if metric.endswith(ERROR):
                continue
            error = result["metrics"].get(f"{metric}{ERROR},{filter}")
            title = metric if filter == "none" else f"{metric} ({filter})"
            text = _format_number(value) + (f" ± {error:.2g}" if error is not None else "")
            yield task, title + format_conditions(entry), text, value


def format_recall(entry: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the task, the context length and the share of right answers as text."""
    for task, metric, text, _ in list_recall(entry):
        yield task, metric, text


def list_recall(entry: dict[str, Any]) -> Iterator[tuple[str, str, str, float]]:
    """Yield the task, the context length, and the share of right answers as text and as a
    number."""
    for task, results in entry["tasks"].items():
        for result in results:
            metric = f"right answers, {result['length']:,} tokens{format_conditions(entry)}"
            yield task, metric, f"{result['accuracy']:.2%}", result["accuracy"]


def format_conditions(entry: dict[str, Any]) -> str:
    """Format what makes results incomparable with those of a plain evaluation: fewer documents, or
    the moving average of the weights."""
    limit = f", limit {entry['limit']:,}" if entry.get("limit") else ""
    return limit + (", ema" if entry.get("ema") else "")


def _format_number(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "not finite"
    return f"{value:.4f}" if abs(value) < 100 else f"{value:,.1f}"
