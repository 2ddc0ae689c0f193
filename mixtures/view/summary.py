"""Summarize a plan: rows, tokens, epochs and shares of each source, phase by phase.

`stands_at` counts all epochs of a source that are consumed, with those of the runs before. A source
whose `stands_at` reaches `max_epochs` is used up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ...dataplane.arrays import Int64
from ...dataplane.order.plan import Phase, Plan
from ...dataplane.order.source_order import Position, SourceOrder
from ...dataplane.order.stream import Stream
from ..planning.branch_point import BranchPoint
from ..planning.continuation import Continuation, compare_continuation, epochs_consumed
from ..planning.open_sources import OpenedSource
from ..planning.shares import drawn_shares
from .debts import WorstDebt, worst_debt


@dataclass(frozen=True, kw_only=True)
class SourceUse:
    """Rows, tokens and epochs that a phase or the whole plan takes from a source."""

    source: str
    rows: int
    tokens: int
    epochs: float
    """Tokens taken, divided by the tokens of the source."""
    stands_at: float
    """Epochs of the source that are consumed at the end, since its first use."""
    share_asked: float
    """Share that the mixture asks for."""
    share: float
    """Share of the tokens that the rows really have."""
    left_over: int
    """Tokens at the end of epochs that do not fill a row."""


@dataclass(frozen=True, kw_only=True)
class PackedSource:
    """A source whose rows are bins of whole documents."""

    source: str
    bins: int
    """Tokens of a bin."""
    padding: float
    """Share of its tokens that are padding, which has no weight in the loss."""


@dataclass(frozen=True, kw_only=True)
class PhaseUse:
    """The rows, steps and tokens of a phase, and its use of each source."""

    phase: str
    first_row: int
    rows: int
    first_step: int
    steps: int
    seq_len: int
    batch_rows: int
    batch_tokens: int
    tokens_asked: int
    tokens: int
    weights_rule: str
    """The rule that gave the shares from the sizes of the sources; empty if the mixture names
    them."""
    left_out: Mapping[str, int]
    """The tokens that sources would have got by that rule besides, without `max_epochs`."""
    changing: bool
    """True if the shares change over the phase; the given shares are averages."""
    sources: tuple[SourceUse, ...]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The rows, steps and tokens of a plan, by phase and in total."""

    hash: str
    parent: str | None
    """Hash of the plan that this one continues."""
    first_row: int
    rows: int
    steps: int
    tokens: int
    phases: tuple[PhaseUse, ...]
    total: tuple[SourceUse, ...]
    continues: Continuation | None
    """State that the plan inherits; None if it continues no run, or the run cannot be read."""
    packed: tuple[PackedSource, ...] = ()
    """The packed sources among those whose datasets are known."""
    worst_debt: WorstDebt
    """The largest distance of a source from its share."""


def summarize(
    stream: Stream,
    branch: BranchPoint | None = None,
    sources: Mapping[str, OpenedSource] | None = None,
) -> Summary:
    """Summarize a plan. `branch` is the run that it continues, if that can be read, and `sources`
    are the datasets of its sources that are known."""
    plan = stream.plan
    edges = [phase.first_row for phase in plan.phases] + [plan.end_row]
    counts = [stream.counts(row) for row in edges]
    phases = [
        _phase_use(stream, phase, after - before)
        for phase, (before, after) in zip(plan.phases, pairwise(counts), strict=True)
    ]
    return Summary(
        hash=plan.hash,
        parent=plan.parent.hash if plan.parent else None,
        first_row=plan.first_row,
        rows=plan.rows,
        steps=plan.steps,
        tokens=plan.tokens,
        phases=tuple(phases),
        total=_total(plan, phases),
        continues=compare_continuation(stream, branch) if branch else None,
        packed=tuple(
            PackedSource(source=name, bins=source.bins, padding=source.padding / source.tokens)
            for name, source in (sources or {}).items()
            if source.bins is not None
        ),
        worst_debt=worst_debt(stream),
    )


def _phase_use(stream: Stream, phase: Phase, rows: Int64) -> PhaseUse:
    plan, length = stream.plan, phase.seq_len
    span = stream.span_at(phase.first_row)
    start = span.starts if span.first_row == phase.first_row else stream.positions(phase.first_row)
    end = stream.positions(phase.end_row)
    asked = drawn_shares(phase)
    return PhaseUse(
        phase=phase.name,
        first_row=phase.first_row,
        rows=phase.rows,
        first_step=phase.first_step,
        steps=phase.steps,
        seq_len=length,
        batch_rows=phase.batch_rows,
        batch_tokens=phase.batch_rows * length,
        tokens_asked=phase.asked_tokens,
        tokens=phase.tokens,
        weights_rule=phase.weights_rule,
        left_out=phase.left_out,
        changing=len(phase.stretches) > 1 or bool(phase.stretches[0].to),
        sources=tuple(
            SourceUse(
                source=source.name,
                rows=int(rows[index]),
                tokens=int(rows[index]) * length,
                epochs=int(rows[index]) * length / source.order.tokens,
                stands_at=epochs_consumed(source.order, end[index], length),
                share_asked=float(asked[index]),
                share=int(rows[index]) / phase.rows,
                left_over=_left_over(source.order, start[index], end[index], length),
            )
            for index, source in enumerate(plan.sources)
        ),
    )


def _total(plan: Plan, phases: Sequence[PhaseUse]) -> tuple[SourceUse, ...]:
    total = []
    for index, source in enumerate(plan.sources):
        uses = [phase.sources[index] for phase in phases]
        tokens = sum(use.tokens for use in uses)
        asked = sum(use.share_asked * phase.tokens for use, phase in zip(uses, phases, strict=True))
        total.append(
            SourceUse(
                source=source.name,
                rows=sum(use.rows for use in uses),
                tokens=tokens,
                epochs=tokens / source.order.tokens,
                stands_at=uses[-1].stands_at,
                share_asked=asked / plan.tokens,
                share=tokens / plan.tokens,
                left_over=sum(use.left_over for use in uses),
            )
        )
    return tuple(total)


def _left_over(order: SourceOrder, start: Position, end: Position, length: int) -> int:
    """Return the tokens that do not fill a row, in the epochs that end between two positions."""
    if end.epoch == start.epoch:
        return 0

    def unfilled(start: Position) -> int:
        last = replace(start, row=order.end_row(start.epoch, length, start.cuts))
        return order.tokens_left(last, length)

    full = end.epoch - start.epoch - 1
    return unfilled(start) + full * unfilled(Position(epoch=start.epoch + 1))
