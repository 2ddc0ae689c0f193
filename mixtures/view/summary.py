"""Summarize a plan: rows, tokens, epochs and shares by source, phase by phase.

`stands_at` counts all consumed epochs, with those of earlier runs. A source is used up when this
reaches `max_epochs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ...dataplane.arrays import Int64
from ...dataplane.order.plan import Phase, Plan
from ...dataplane.order.row_lengths import count_rows_by_length
from ...dataplane.order.source_order import Position, SourceOrder
from ...dataplane.order.steered import decided_phases
from ...dataplane.order.stream import Stream
from ..planning.branch_point import BranchPoint
from ..planning.continuation import Continuation, compare_continuation, epochs_consumed
from ..planning.open_sources import OpenedSource
from ..planning.shares import drawn_shares
from .controlled import ControlledPhase, find_bounds
from .debts import WorstDebt, find_worst_debt


@dataclass(frozen=True, kw_only=True)
class SourceUse:
    """Rows, tokens and epochs taken from a source, by a phase or the whole plan."""

    source: str
    rows: int
    tokens: int
    epochs: float
    """Tokens taken, divided by the source's tokens."""
    stands_at: float
    """Epochs consumed at the end, since the first use."""
    share_asked: float
    """Share in the mixture."""
    share: float
    """Actual share of the tokens."""
    left_over: int
    """Tokens at the ends of epochs that fill no row."""


@dataclass(frozen=True, kw_only=True)
class PackedSource:
    """A source whose rows are bins with whole documents."""

    source: str
    bins: int
    """Tokens per bin."""
    padding: float
    """Share of padding tokens, without weight in the loss."""


@dataclass(frozen=True, kw_only=True)
class PhaseUse:
    """A phase's rows, steps and tokens, and its use of sources."""

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
    """Rule that derived the shares from source sizes; empty for shares named in the mixture."""
    left_out: Mapping[str, int]
    """Further tokens by source, which this rule would give without `max_epochs`."""
    changing: bool
    """True if shares change over the phase; the shares here are averages."""
    sources: tuple[SourceUse, ...]
    lengths: tuple[LengthUse, ...] = ()
    """Steps by the length of their rows, if steps have one (`steps_by_length`)."""


@dataclass(frozen=True, kw_only=True)
class LengthUse:
    """Steps whose rows have one length."""

    tokens: int
    """Tokens of the model's rows."""
    rows: int
    """Rows of this length in a step."""
    steps: int


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A plan's rows, steps and tokens, by phase and in total."""

    hash: str
    parent: str | None
    """Hash of the continued plan."""
    first_row: int
    rows: int
    steps: int
    tokens: int
    phases: tuple[PhaseUse, ...]
    total: tuple[SourceUse, ...]
    continues: Continuation | None
    """Inherited state; None if the plan continues no run, or the run cannot be read."""
    packed: tuple[PackedSource, ...] = ()
    """Packed sources with known datasets."""
    unlearnt: Mapping[str, int]
    """Tokens in documents without loss, by source."""
    refilled: Mapping[str, int]
    """Refilled rows, by source."""
    worst_debt: WorstDebt
    """Largest distance between a source and its share."""
    controlled: tuple[ControlledPhase, ...] = ()
    """Phases whose shares are decided during the run."""
    decisions: int = 0
    """Decisions that the run has made; they are part of all numbers."""


def summarize(
    stream: Stream,
    branch: BranchPoint | None = None,
    sources: Mapping[str, OpenedSource] | None = None,
) -> Summary:
    """Summarize a plan. `branch` is the continued run, if it can be read; `sources` are the known
    datasets."""
    plan = stream.plan
    edges = [phase.first_row for phase in plan.phases] + [plan.end_row]
    counts = [stream.counts(row) for row in edges]
    phases = [
        _phase_use(stream, phase, after - before)
        for phase, (before, after) in zip(decided_phases(plan), pairwise(counts), strict=True)
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
        unlearnt={
            source.name: sum(end - start for start, end in source.unlearnt)
            for source in plan.sources
            if source.unlearnt
        },
        refilled={source.name: len(source.refills) for source in plan.sources if source.refills},
        worst_debt=find_worst_debt(stream),
        controlled=tuple(
            find_bounds(
                plan,
                [
                    {use.source: (use.stands_at, use.epochs) for use in phase.sources}
                    for phase in phases
                ],
            )
        ),
        decisions=len(plan.decisions),
    )


def _phase_use(stream: Stream, phase: Phase, rows: Int64) -> PhaseUse:
    plan, length = stream.plan, phase.seq_len
    span = stream.find_span(phase.first_row)
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
        lengths=tuple(_length_uses(plan, phase, rows)),
    )


def _length_uses(plan: Plan, phase: Phase, rows: Int64) -> Iterator[LengthUse]:
    """Yield the lengths in a phase, the shortest first; `rows` are the phase's, by source."""
    if not plan.lengths:
        return
    for length, count in count_rows_by_length(plan.lengths, phase, rows.tolist()).items():
        yield LengthUse(
            tokens=length,
            rows=phase.batch_rows * phase.seq_len // length,
            steps=count // phase.batch_rows,
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
    """Count the tokens that fill no row, in the epochs that end between two positions."""
    if end.epoch == start.epoch:
        return 0

    def tokens_left_over(position: Position) -> int:
        end_row = order.end_row(position.epoch, length, position.cuts)
        return order.tokens_left(replace(position, row=end_row), length)

    num_full_epochs = end.epoch - start.epoch - 1
    next_epoch = Position(epoch=start.epoch + 1)
    return tokens_left_over(start) + num_full_epochs * tokens_left_over(next_epoch)
