"""Compare a plan with the run that it continues: the state it inherits, and the tokens both take.

The run may also go on with its own plan: the sibling of this one. Both draw from the same sources,
and may take the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...dataplane.arrays import Int64
from ...dataplane.order.source_order import Position, SourceOrder
from ...dataplane.order.stream import Stream
from .branch_point import BranchPoint, inherited_debts
from .shares import drawn_shares


@dataclass(frozen=True, kw_only=True)
class InheritedSource:
    """A source's state at the point where the plan leaves the continued run."""

    source: str
    stands_at: float
    """Epochs that the run has consumed."""
    sibling_tokens: int
    """Tokens that the run takes after this point if it goes on with its own plan."""
    shared_tokens: int
    """The part of `sibling_tokens` that this plan takes as well, in the same epoch."""
    owed: int
    """Tokens owed to the source since row 0; negative if it is ahead."""
    unpaid: int
    """The part of `owed` that this plan does not carry, and a later plan has to pay. It is all of
    `owed` if this plan never draws from the source."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    """The point at which a plan continues another, and the sources' state there."""

    plan: str
    """Hash of the continued plan."""
    row: int
    step: int
    token: int
    sources: tuple[InheritedSource, ...]


def epochs_consumed(order: SourceOrder, position: Position, length: int) -> float:
    """Compute the epochs consumed at a position, in rows of `length` tokens."""
    tokens_left = order.tokens_left(position, length)
    return position.epoch + 1 - tokens_left / max(order.tokens - 1, 1)


def compare_continuation(stream: Stream, branch: BranchPoint) -> Continuation:
    """Compare the plan of `stream` with the run that it continues."""
    plan, parent = stream.plan, branch.plan
    length = branch.last_phase.seq_len
    names = [source.name for source in plan.sources]
    debts = inherited_debts(branch, names)
    is_drawn = [any(shares) for shares in zip(*map(drawn_shares, plan.phases), strict=True)]
    inherited = []
    for parent_index, source in enumerate(parent.sources):
        index = names.index(source.name)
        carried_debt = plan.debts[index] if is_drawn[index] else 0
        sibling_spans = _served_spans(branch.stream, parent_index, branch.row)
        plan_spans = _served_spans(stream, index, plan.first_row)
        inherited.append(
            InheritedSource(
                source=source.name,
                stands_at=epochs_consumed(source.order, branch.positions[parent_index], length),
                sibling_tokens=sum(_count_tokens(spans) for spans in sibling_spans.values()),
                shared_tokens=sum(
                    _count_tokens(_intersect_spans(spans, plan_spans[epoch]))
                    for epoch, spans in sibling_spans.items()
                    if epoch in plan_spans
                ),
                owed=round(debts[index]),
                unpaid=round(debts[index] - carried_debt),
            )
        )
    return Continuation(
        plan=parent.hash,
        row=branch.row,
        step=branch.step,
        token=branch.token,
        sources=tuple(inherited),
    )


def _served_spans(stream: Stream, source: int, first_row: int) -> dict[int, Int64]:
    """Collect, by epoch, a source's token spans [n, 2] that rows from `first_row` on serve,
    sorted."""
    order = stream.plan.sources[source].order
    spans_by_epoch: dict[int, list[Int64]] = {}
    for length_span in stream.spans:
        if length_span.end_row <= first_row:
            continue
        counts_before = length_span.counts[source]
        first_draw = int(
            stream.counts(max(first_row, length_span.first_row))[source] - counts_before
        )
        end_draw = int(stream.counts(length_span.end_row)[source] - counts_before)
        length = length_span.length
        position = order.advance(length_span.starts[source], length, first_draw)
        for epoch, spans in order.served_spans(position, length, end_draw - first_draw):
            spans_by_epoch.setdefault(epoch, []).append(spans)
    joined = {epoch: np.concatenate(spans) for epoch, spans in spans_by_epoch.items()}
    return {epoch: spans[np.argsort(spans[:, 0])] for epoch, spans in joined.items()}


def _intersect_spans(a: Int64, b: Int64) -> Int64:
    """Intersect two lists of spans [n, 2], both sorted and without overlaps."""
    bounds = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    starts, ends = bounds[:-1], bounds[1:]
    in_a, in_b = (
        np.searchsorted(spans[:, 0], starts, side="right")
        > np.searchsorted(spans[:, 1], starts, side="right")
        for spans in (a, b)
    )
    in_both = in_a & in_b
    return np.stack([starts[in_both], ends[in_both]], axis=1)


def _count_tokens(spans: Int64) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum())
