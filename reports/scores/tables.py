"""Tables of the scores of a run, and of several runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from ...console.html.page import section, sides
from ...trainer.scores.missing import Missing, note
from ...trainer.scores.records import recalled, values

STEPS = 8
"""Newest steps in the table."""


def scores_section(
    entries: Sequence[dict[str, Any]], missing: Sequence[Missing] = (), run: str = ""
) -> str:
    """Return the table of the scores by step: of several evaluations of a step, the last; and what
    is missing of a run."""
    by_step: dict[int, dict[tuple[str, str], str]] = {}
    for entry in entries:
        if found := values(entry):
            by_step.setdefault(entry["step"], {}).update(found)
    table = _table(by_step) if by_step else ""
    body = note(missing, run) + table
    return section("Scores", body) if body else ""


def _table(by_step: Mapping[int, Mapping[tuple[str, str], str]]) -> str:
    steps = sorted(by_step)[-STEPS:]
    rows = "".join(
        f"<tr><th>{escape(task)}</th><td>{escape(metric)}</td>"
        + "".join(f"<td>{by_step[step].get((task, metric), '–')}</td>" for step in steps)
        + "</tr>"
        for task, metric in dict.fromkeys(key for step in steps for key in by_step[step])
    )
    heads = "".join(f"<th>step {step:,}</th>" for step in steps)
    return (
        '<div class="scroll"><table class="history"><thead><tr><th>task</th><th>metric</th>'
        f"{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def compared_scores(
    runs: Mapping[str, tuple[Sequence[dict[str, Any]], Sequence[dict[str, Any]]]],
) -> str:
    """Return the table of the newest scores and recall of several runs beside each other."""
    columns = [_newest(scores, recall) for scores, recall in runs.values()]
    keys = dict.fromkeys(key for column in columns for key in column)
    if not keys:
        return ""
    rows = []
    for task, metric in keys:
        found = [column.get((task, metric), ("–", None)) for column in columns]
        cells = [
            f"{text}{'' if step is None else f' <em>step {step:,}</em>'}" for text, step in found
        ]
        differ = len({text for text, _ in found}) > 1
        rows.append((differ, [escape(task), escape(metric), *cells]))
    return section("Scores", sides([*map(escape, ("task", "metric", *runs))], rows))


def _newest(
    scores: Sequence[dict[str, Any]], recall: Sequence[dict[str, Any]]
) -> dict[tuple[str, str], tuple[str, int]]:
    """Return the newest value of each task and metric, and its step."""
    found: dict[tuple[str, str], tuple[str, int]] = {}
    for entry in sorted(scores, key=lambda entry: int(entry["step"])):
        found |= {key: (text, entry["step"]) for key, text in values(entry).items()}
    for entry in sorted(recall, key=lambda entry: int(entry["step"])):
        found |= {(task, metric): (text, entry["step"]) for task, metric, text in recalled(entry)}
    return found
