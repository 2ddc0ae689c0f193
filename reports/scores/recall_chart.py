"""Draw a run's recall by context length."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from ...console.html.chart import BOTTOM, LINE, Chart, Curve
from ...console.html.page import WIDE, colour, legend, section
from ...trainer.scores.records import format_conditions


def recall_section(entries: Sequence[dict[str, Any]]) -> str:
    """Render the share of right answers by context length, as last measured for each task at the
    newest step; empty without measurements."""
    if not entries:
        return ""
    step = max(entry["step"] for entry in entries)
    newest: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if entry["step"] == step:
            newest |= {
                f"{task}{format_conditions(entry)}": scores
                for task, scores in entry["tasks"].items()
            }
    lengths = {score["length"] for scores in newest.values() for score in scores}
    ticks = [math.log2(length) for length in sorted(lengths)]
    chart = Chart(
        WIDE,
        248,
        (ticks[0] - 0.2, ticks[-1] + 0.2),
        (0.0, 1.0),
        lambda share: f"{share:.0%}",
        bottom=BOTTOM + LINE,
        x_label=lambda tick: f"{round(2**tick):,}",
        x_unit="tokens of context",
        x_places=ticks,
    )
    chart.axes()
    for number, scores in enumerate(newest.values()):
        curve = Curve(
            [math.log2(score["length"]) for score in scores],
            [score["accuracy"] for score in scores],
        )
        chart.line(curve, "medium", colour(number))
    return section(
        "Recall by length",
        chart.render("share of right answers over the length of the context") + _table(newest),
        legend=legend(list(newest)),
        unit=f"right answers · step {step:,}",
    )


def _table(newest: dict[str, list[dict[str, Any]]]) -> str:
    rows = "".join(
        f"<tr><th>{escape(task)}</th><td>{score['length']:,}</td><td>{score['accuracy']:.2%}</td>"
        f"<td>{score['loss']:.4f}</td><td>{score['answers']:,}</td></tr>"
        for task, scores in newest.items()
        for score in scores
    )
    headings = ("task", "tokens of context", "right answers", "loss, nats per token", "answers")
    head = "".join(f"<th>{heading}</th>" for heading in headings)
    return (
        f'<div class="scroll"><table class="history"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
