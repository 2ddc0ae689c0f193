"""Render scores as tables: a run by step, and several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ...console.html.page import comparison_table, section
from ...trainer.scores.missing import ScoreGap, render_gaps
from ...trainer.scores.records import format_recall, format_scores

MAX_STEPS = 8
"""Newest steps in the table, at most."""


def scores_section(
    entries: Sequence[dict[str, Any]], gaps: Sequence[ScoreGap] = (), run: str = ""
) -> str:
    """Render the run's scores by step, as the last evaluation at each step has them, after a note
    on missing scores."""
    by_step: dict[int, dict[tuple[str, str], str]] = {}
    for entry in entries:
        if scores := format_scores(entry):
            by_step.setdefault(entry["step"], {}).update(scores)
    table = _table(by_step) if by_step else ""
    body = render_gaps(gaps, run) + table
    return section("Scores", body) if body else ""


def _table(by_step: Mapping[int, Mapping[tuple[str, str], str]]) -> str:
    steps = sorted(by_step)[-MAX_STEPS:]
    rows = "".join(
        f"<tr><th>{escape(task)}</th><td>{escape(metric)}</td>"
        + "".join(f"<td>{by_step[step].get((task, metric), '–')}</td>" for step in steps)
        + "</tr>"
        for task, metric in dict.fromkeys(key for step in steps for key in by_step[step])
    )
    headings = "".join(f"<th>step {step:,}</th>" for step in steps)
    return (
        '<div class="scroll"><table class="history"><thead><tr><th>task</th><th>metric</th>'
        f"{headings}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def compare_scores(
    runs: Mapping[str, tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]],
) -> str:
    """Render the newest scores and recall of several runs side by side. `runs` has both kinds of
    entries by run."""
    columns = [_newest(scores, recall) for scores, recall in runs.values()]
    keys = dict.fromkeys(key for column in columns for key in column)
    if not keys:
        return ""
    rows = []
    for task, metric in keys:
        scored = [column.get((task, metric), ("–", None)) for column in columns]
        cells = [
            f"{score}{'' if step is None else f' <em>step {step:,}</em>'}" for score, step in scored
        ]
        differ = len({score for score, _ in scored}) > 1
        rows.append((differ, [escape(task), escape(metric), *cells]))
    return section("Scores", comparison_table([*map(escape, ("task", "metric", *runs))], rows))


def _newest(
    scores: Sequence[dict[str, Any]], recall: Sequence[dict[str, Any]]
) -> dict[tuple[str, str], tuple[str, int]]:
    """Return the newest score and its step, by task and metric."""
    newest: dict[tuple[str, str], tuple[str, int]] = {}
    for entry in sorted(scores, key=lambda entry: int(entry["step"])):
        newest |= {key: (score, entry["step"]) for key, score in format_scores(entry).items()}
    for entry in sorted(recall, key=lambda entry: int(entry["step"])):
        newest |= {
            (task, metric): (score, entry["step"]) for task, metric, score in format_recall(entry)
        }
    return newest
