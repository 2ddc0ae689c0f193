"""Format a plan's summary as a table for people, or as JSON data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from ...console.progress import exact_count, format_duration, format_number
from ..planning.continuation import Continuation
from .controlled import format_bounds
from .summary import PhaseUse, SourceUse, Summary

HEAD = (
    "source",
    "rows",
    "tokens",
    "epochs",
    "total epochs",
    "share",
    "asked",
    "left over",
)


def format_table(summary: Summary, tokens_per_second: float | None = None) -> str:
    """Format a plan's summary; with a speed, also the time by source and phase."""
    lines = [
        f"plan {summary.hash}: {summary.tokens:,} tokens in "
        f"{exact_count(summary.rows, 'rows')} and "
        f"{exact_count(summary.steps, 'steps')}{_hours(summary.tokens, tokens_per_second)}"
    ]
    if summary.continues:
        lines += ["", *_continuation(summary.continues)]
    elif summary.parent:
        lines.append(f"continues plan {summary.parent} at row {summary.first_row:,}")
    for phase in summary.phases:
        lines += ["", *_phase(phase, tokens_per_second)]
        for controlled in summary.controlled:
            if controlled.phase == phase.phase:
                lines += format_bounds(controlled)
    if len(summary.phases) > 1:
        lines += ["", "total", *_uses(summary.total, tokens_per_second)]
    lines += ["", *_notes(summary)]
    return "\n".join(lines).rstrip()


def json_data(summary: Summary, tokens_per_second: float | None = None) -> dict[str, Any]:
    """Return the summary as JSON data; with a speed, also the seconds."""
    data = asdict(summary)
    for phase in data["phases"]:
        if not phase["lengths"]:
            del phase["lengths"]
    if tokens_per_second:
        data["seconds"] = summary.tokens / tokens_per_second
        for uses in (data["total"], *(phase["sources"] for phase in data["phases"])):
            for use in uses:
                use["seconds"] = use["tokens"] / tokens_per_second
        for phase in data["phases"]:
            phase["seconds"] = phase["tokens"] / tokens_per_second
    return data


def _phase(phase: PhaseUse, speed: float | None) -> Iterator[str]:
    end_row, end_step = phase.first_row + phase.rows, phase.first_step + phase.steps
    time = _hours(phase.tokens, speed)
    yield f"phase {phase.phase}: {phase.tokens:,} tokens{_rounded(phase)}{time}"
    rows = "1 row" if phase.batch_rows == 1 else f"{phase.batch_rows:,} rows"
    yield (
        f"  steps {phase.first_step:,} to {end_step:,}, rows {phase.first_row:,} to {end_row:,}; "
        f"{rows} of {phase.seq_len:,} tokens per step ({format_number(phase.batch_tokens)} tokens)"
    )
    if phase.lengths:
        yield "  " + ", ".join(
            f"{use.steps:,} step{'s' * (use.steps != 1)} of {use.rows:,} rows of {use.tokens:,}"
            for use in phase.lengths
        )
    yield from _uses(phase.sources, speed)
    if phase.weights_rule:
        yield f"  The shares are {phase.weights_rule}."
    if any(phase.left_out.values()):
        planned = {use.source: use.rows for use in phase.sources}
        yield "  Left out by max_epochs: " + ", ".join(
            f"{source} {format_number(tokens)} tokens"
            + ("" if planned[source] else " (it gets none)")
            for source, tokens in phase.left_out.items()
            if tokens
        )
    if phase.changing:
        yield "  The shares change over the phase; the table shows averages."


def _rounded(phase: PhaseUse) -> str:
    more = phase.tokens - phase.tokens_asked
    if not more:
        return ""
    word = "more" if more > 0 else "fewer"
    return f" ({abs(more):,} {word} than asked: rounded to whole steps)"


def _uses(uses: Sequence[SourceUse], speed: float | None) -> Iterator[str]:
    drawn = [use for use in uses if use.rows or use.share_asked]
    rows = [
        (
            use.source,
            f"{use.rows:,}",
            format_number(use.tokens),
            f"{use.epochs:.3g}" if use.epochs < 1000 else f"{use.epochs:,.0f}",
            f"{use.stands_at:.3f}",
            f"{use.share:.2%}",
            f"{use.share_asked:.2%}",
            format_number(use.left_over) if use.left_over else "-",
            *((format_duration(use.tokens / speed),) if speed else ()),
        )
        for use in drawn
    ]
    yield from columns((*HEAD, *(("time",) if speed else ())), rows)


def _continuation(continued: Continuation) -> Iterator[str]:
    yield (
        f"continues plan {continued.plan} at step {continued.step:,} (row {continued.row:,}, "
        f"{continued.token:,} tokens)"
    )
    head = ("source", "total epochs", "parent would take", "overlap")
    rows = [
        (
            source.source,
            f"{source.stands_at:.3f}",
            format_number(source.sibling_tokens),
            format_number(source.shared_tokens)
            + (
                f" ({source.shared_tokens / source.sibling_tokens:.0%})"
                if source.shared_tokens
                else ""
            ),
        )
        for source in continued.sources
    ]
    yield from columns(head, rows)
    unpaid = [source for source in continued.sources if source.unpaid]
    if unpaid:
        yield "  The plan does not carry debts of sources that it does not draw from: " + ", ".join(
            f"{source.source} {_debt(source.unpaid)}" for source in unpaid
        )


def _debt(tokens: int) -> str:
    return f"{abs(tokens):,} tokens " + ("behind" if tokens > 0 else "ahead")


def _notes(summary: Summary) -> Iterator[str]:
    yield _worst_debt(summary)
    if summary.decisions:
        yield (
            f"Decisions of the run about shares, which all numbers here follow: "
            f"{summary.decisions:,} (`mixtures audit RUN --decisions`)."
        )
    uses = [use for phase in summary.phases for use in phase.sources]
    if any(use.left_over for use in uses):
        yield "left over: tokens at the end of an epoch that do not fill a row."
    for packed in summary.packed:
        yield (
            f"{packed.source} is packed to {packed.bins:,} tokens: {packed.padding:.2%} of its "
            "tokens are padding, which counts as tokens and has no weight in the loss."
        )
    for source, tokens in summary.unlearnt.items():
        yield f"{source} has {tokens:,} tokens in documents without loss (`without`)."
    for source, rows in summary.refilled.items():
        yield f"{rows:,} rows of {source} are refilled with rows that follow the plan's last."


def _worst_debt(summary: Summary) -> str:
    worst = summary.worst_debt
    text = f"worst debt: {worst.source} is {_debt(round(worst.tokens))} at row {worst.row:,}"
    text += f", {worst.longest_rows:.2f} of the longest row so far"
    if worst.rows_examined < summary.rows:
        text += f" ({worst.rows_examined:,} rows around changes of length were examined)"
    return text + "."


def _hours(tokens: int, speed: float | None) -> str:
    return f", {format_duration(tokens / speed)}" if speed else ""


def columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, right-aligned but for the first column."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        first, *cells = (
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  " + "  ".join([first, *cells]).rstrip()
