"""Render losses by source, trained and held out, in nats per token and bits per byte."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ...console.html.page import section
from ..board.byte_sizes import BITS, BytesPerToken, bits_per_byte, mean_loss
from .reading.data import RunData

ALL = "all"
Column = dict[str, float]
"""A value by source."""


def losses_section(runs: Sequence[RunData]) -> str:
    """Render the table, with columns for each run; empty for runs on synthetic rows."""
    if not any(run.stored.sources for run in runs):
        return ""
    columns_by_run = [_columns(run) for run in runs]
    headings = list(dict.fromkeys(heading for columns in columns_by_run for heading in columns))
    sources = dict.fromkeys(
        source for columns in columns_by_run for column in columns.values() for source in column
    )
    rows = "".join(
        f"<tr><th>{escape(source)}</th>"
        + "".join(
            f"<td>{_loss(columns.get(heading, {}).get(source))}</td>"
            for columns in columns_by_run
            for heading in headings
        )
        + "</tr>"
        for source in sources
    )
    subheads = "".join(f"<th>{heading}</th>" for _ in runs for heading in headings)
    if len(runs) > 1:
        names = "".join(f'<th colspan="{len(headings)}">{escape(run.name)}</th>' for run in runs)
        run_row = f'<tr><th rowspan="2">source</th>{names}</tr>'
        css_class = ""
    else:
        run_row = ""
        subheads = f"<th>source</th>{subheads}"
        css_class = "losses"
    table = (
        f'<div class="scroll"><table class="{css_class}"><thead>{run_row}<tr class="sub">{subheads}'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    return section("Losses by source", table, unit=_note(runs))


def _note(runs: Sequence[RunData]) -> str:
    counts = sorted({len(run.last) for run in runs})
    if counts[-1] == 1:
        return "of the last step"
    return f"mean of the last {' or '.join(map(str, counts))} steps"


def _columns(run: RunData) -> dict[str, Column]:
    """Return the run's columns by heading, without empty ones. Losses that were read in bits per
    byte have no column in nats."""
    evaluation = [run.evaluation] if run.evaluation else []
    if run.sizes is not None:
        columns = {BITS: _losses(run.last), f"held-out {BITS}": _losses(evaluation)}
        sizes: BytesPerToken = run.sizes.trained
    else:
        stored_sizes = run.stored.sizes
        trained, held_out = (
            (stored_sizes.trained, stored_sizes.held_out) if stored_sizes else ({}, {})
        )
        columns = {
            "loss": _losses(run.last),
            BITS: _in_bits(_losses(run.last), trained, run.bits),
            "held-out loss": _losses(evaluation),
            f"held-out {BITS}": _in_bits(_losses(evaluation), held_out, run.held_out_bits),
        }
        sizes = trained
    columns["bytes per token"] = sizes
    return {heading: column for heading, column in columns.items() if column}


def _losses(entries: Sequence[dict[str, Any]]) -> Column:
    """Return the mean loss over all sources, and by source."""
    sources = dict.fromkeys(source for entry in entries for source in entry["sources"])
    means = {ALL: mean_loss(entries)}
    for source in sources:
        means[source] = mean_loss(
            [entry["sources"][source] for entry in entries if source in entry["sources"]]
        )
    return {source: mean for source, mean in means.items() if mean is not None}


def _in_bits(losses: Column, sizes: BytesPerToken, overall: float | None) -> Column:
    """Return the losses in bits per byte; `overall` is the loss over all sources."""
    by_source = {
        source: bits_per_byte(losses[source], size)
        for source, size in sizes.items()
        if source in losses
    }
    return {**({ALL: overall} if overall is not None else {}), **by_source}


def _loss(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
