"""Table of the losses by source, in nats per token and in bits per byte, trained and held out."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from ...console.html.page import section
from ..board.byte_sizes import BITS, BytesPerToken, bits_per_byte, mean_loss
from .reading.data import RunData

ALL = "all"
Column = dict[str, float]
"""A value of each source."""


def losses_section(runs: Sequence[RunData]) -> str:
    """Return the table, with columns for each run; empty for runs of synthetic rows."""
    if not any(run.stored.sources for run in runs):
        return ""
    columns = [_columns(run) for run in runs]
    heads = list(dict.fromkeys(head for own in columns for head in own))
    sources = dict.fromkeys(name for own in columns for column in own.values() for name in column)
    rows = "".join(
        f"<tr><th>{escape(name)}</th>"
        + "".join(
            f"<td>{_shown(own.get(head, {}).get(name))}</td>" for own in columns for head in heads
        )
        + "</tr>"
        for name in sources
    )
    names = "".join(f'<th colspan="{len(heads)}">{escape(run.name)}</th>' for run in runs)
    above = f'<tr><th rowspan="2">source</th>{names}</tr>' if len(runs) > 1 else ""
    under = "".join(f"<th>{head}</th>" for _ in runs for head in heads)
    first = "" if above else "<th>source</th>"
    kind = "" if above else "losses"
    table = (
        f'<div class="scroll"><table class="{kind}"><thead>{above}<tr class="sub">{first}{under}'
        f"</tr></thead><tbody>{rows}</tbody></table></div>"
    )
    return section("Losses by source", table, unit=_note(runs))


def _note(runs: Sequence[RunData]) -> str:
    counts = sorted({len(run.last) for run in runs})
    if counts[-1] == 1:
        return "of the last step"
    return f"mean of the last {' or '.join(map(str, counts))} steps"


def _columns(run: RunData) -> dict[str, Column]:
    """Return the columns of a run that have values. Losses that are in bits already have one."""
    known, evaluation = run.stored.sizes, [run.evaluation] if run.evaluation else []
    if run.sizes is not None:
        found = {BITS: _losses(run.last), f"held-out {BITS}": _losses(evaluation)}
        sizes: BytesPerToken = run.sizes.trained
    else:
        trained, held_out = (known.trained, known.held_out) if known else ({}, {})
        found = {
            "loss": _losses(run.last),
            BITS: _in_bits(_losses(run.last), trained, run.bits),
            "held-out loss": _losses(evaluation),
            f"held-out {BITS}": _in_bits(_losses(evaluation), held_out, run.held_out_bits),
        }
        sizes = trained
    found["bytes per token"] = sizes
    return {head: column for head, column in found.items() if column}


def _losses(entries: Sequence[dict[str, Any]]) -> Column:
    """Return the mean loss of all sources, and of each."""
    names = dict.fromkeys(name for entry in entries for name in entry["sources"])
    means = {ALL: mean_loss(entries)}
    for name in names:
        own = [entry["sources"][name] for entry in entries if name in entry["sources"]]
        means[name] = mean_loss(own)
    return {name: value for name, value in means.items() if value is not None}


def _in_bits(losses: Column, sizes: BytesPerToken, together: float | None) -> Column:
    found = {
        name: bits_per_byte(losses[name], size) for name, size in sizes.items() if name in losses
    }
    return {**({ALL: together} if together is not None else {}), **found}


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"
