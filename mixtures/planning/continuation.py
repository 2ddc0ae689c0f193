"""Compare a plan with the continued run: what it inherits, and how far they overlap.

The run may go on with its plan beside this one. Both plans draw from the same sources, and may take
the same tokens.
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
    """A source's state in the continued run."""

    source: str
    stands_at: float
    """Epochs that the run has consumed."""
    sibling_tokens: int
    """Tokens that the run takes if it goes on with its plan."""
    shared_tokens: int
    """The part of `sibling_tokens` that this plan takes as well, in the same epoch."""
    owed: int
    """Tokens owed to the source since row 0; negative if it is ahead."""
    unpaid: int
    """The part of `owed` that this plan does not carry: all, if it never draws from the source. A
    later plan has to pay it."""


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
    """Compute the epochs consumed at a position."""
    remaining = order.tokens_left(position, length)
    return position.epoch + 1 - remaining / max(order.tokens - 1, 1)


def compare_continuation(stream: Stream, branch: BranchPoint) -> Continuation:
    """Compare the plan of `stream` with the run it continues."""
    plan, before = stream.plan, branch.plan
    length = branch.last_phase.seq_len
    names = [source.name for source in plan.sources]
    debts = inherited_debts(branch, names)
    drawn = [any(shares) for shares in zip(*map(drawn_shares, plan.phases), strict=True)]
    inherited = []
    for index, source in enumerate(before.sources):
        number = names.index(source.name)
        carried = plan.debts[number] if drawn[number] else 0
        sibling = _served_spans(branch.stream, index, branch.row)
        planned = _served_spans(stream, number, plan.first_row)
        inherited.append(
            InheritedSource(
                source=source.name,
                stands_at=epochs_consumed(source.order, branch.positions[index], length),
                sibling_tokens=sum(_count_tokens(spans) for spans in sibling.values()),
                shared_tokens=sum(
                    _count_tokens(_intersect_spans(spans, planned[epoch]))
                    for epoch, spans in sibling.items()
                    if epoch in planned
                ),
                owed=round(debts[number]),
                unpaid=round(debts[number] - carried),
            )
        )
    return Continuation(
        plan=before.hash,
        row=branch.row,
        step=branch.step,
        token=branch.token,
        sources=tuple(inherited),
    )


def _served_spans(stream: Stream, source: int, first_row: int) -> dict[int, Int64]:
    """Collect, by epoch, the token spans [n, 2] that rows from `first_row` serve, sorted."""
    order = stream.plan.sources[source].order
    by_epoch: dict[int, list[Int64]] = {}
    for span in stream.spans:
        if span.end_row <= first_row:
            continue
        begun = int(stream.counts(max(first_row, span.first_row))[source] - span.counts[source])
        ended = int(stream.counts(span.end_row)[source] - span.counts[source])
        position = order.advance(span.starts[source], span.length, begun)
        for epoch, spans in order.served_spans(position, span.length, ended - begun):
            by_epoch.setdefault(epoch, []).append(spans)
    return {
        epoch: (joined := np.concatenate(spans))[np.argsort(joined[:, 0])]
        for epoch, spans in by_epoch.items()
    }


def _intersect_spans(a: Int64, b: Int64) -> Int64:
    """Intersect two lists of spans [n, 2], both sorted and without overlaps."""
    edges = np.unique(np.concatenate([a.ravel(), b.ravel()]))
    inside = [
        np.searchsorted(spans[:, 0], edges[:-1], side="right")
        > np.searchsorted(spans[:, 1], edges[:-1], side="right")
        for spans in (a, b)
    ]
    both = inside[0] & inside[1]
    return np.stack([edges[:-1][both], edges[1:][both]], axis=1)


def _count_tokens(spans: Int64) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum())
