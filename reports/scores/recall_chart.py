"""The chart of what a run recalls, by the length of the context."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from ...console.html.chart import BOTTOM, LINE, Chart, Curve
from ...console.html.page import WIDE, colour, legend, section
from ...trainer.scores.records import mark


def recall_section(entries: Sequence[dict[str, Any]]) -> str:
    """Draw the share of right answers by length: of each task, its last measurement at the newest
    step. Return nothing if nothing was measured."""
    if not entries:
        return ""
    step = max(entry["step"] for entry in entries)
    newest: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if entry["step"] == step:
            named = {f"{task}{mark(entry)}": found for task, found in entry["tasks"].items()}
            newest.update(named)
    lengths = {each["length"] for results in newest.values() for each in results}
    places = [math.log2(length) for length in sorted(lengths)]
    chart = Chart(
        WIDE,
        248,
        (places[0] - 0.2, places[-1] + 0.2),
        (0.0, 1.0),
        lambda share: f"{share:.0%}",
        bottom=BOTTOM + LINE,
        x_label=lambda place: f"{round(2**place):,}",
        x_unit="tokens of context",
        x_places=places,
    )
    chart.axes()
    for number, results in enumerate(newest.values()):
        curve = Curve(
            [math.log2(each["length"]) for each in results],
            [each["accuracy"] for each in results],
        )
        chart.line(curve, "medium", colour(number))
    return section(
        "Recall by length",
        chart.text("share of right answers over the length of the context") + _table(newest),
        legend=legend(list(newest)),
        unit=f"right answers · step {step:,}",
    )


def _table(newest: dict[str, list[dict[str, Any]]]) -> str:
    rows = "".join(
        f"<tr><th>{escape(task)}</th><td>{each['length']:,}</td><td>{each['accuracy']:.2%}</td>"
        f"<td>{each['loss']:.4f}</td><td>{each['answers']:,}</td></tr>"
        for task, results in newest.items()
        for each in results
    )
    heads = ("task", "tokens of context", "right answers", "loss, nats per token", "answers")
    head = "".join(f"<th>{name}</th>" for name in heads)
    return (
        f'<div class="scroll"><table class="history"><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )
