"""What a plan inherits from the run that it continues, and how far the two then overlap.

The run may go on with its own plan beside this one: siblings draw from the same sources, and may
take the same tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...dataplane.order.permutation import Int64
from ...dataplane.order.source_order import Position, SourceOrder
from ...dataplane.order.stream import Stream
from .branch_point import BranchPoint, inherited_debts


@dataclass(frozen=True, kw_only=True)
class InheritedSource:
    """What a source brings along from the run that a plan continues."""

    source: str
    stands_at: float
    passed_over: int
    """Tokens of the current epoch that the run had left and this plan cannot take up."""
    sibling_tokens: int
    """What the run itself takes if it goes on with its own plan."""
    shared_tokens: int
    """Of those, what this plan takes as well, in the same epoch."""
    owed: int
    """Tokens that the source is still to be given, or has been given too many."""
    written_off: int
    """What was owed besides: with it, some source would be off by more than a row."""


@dataclass(frozen=True, kw_only=True)
class Continuation:
    plan: str
    row: int
    step: int
    token: int
    sources: tuple[InheritedSource, ...]


def epochs_consumed(order: SourceOrder, position: Position, length: int) -> float:
    """Epochs behind a position."""
    left = order.rows(position.epoch, 1) - position.row * length
    return position.epoch + 1 - left / max(order.tokens - 1, 1)


def continuation(stream: Stream, branch: BranchPoint) -> Continuation:
    """What the plan of `stream` inherits from the run that it branches from."""
    plan, before = stream.plan, branch.plan
    length, first = branch.last_phase.seq_len, plan.phases[0].seq_len
    names = [source.name for source in plan.sources]
    owed = inherited_debts(branch, plan)
    found = []
    for index, source in enumerate(before.sources):
        number = names.index(source.name)
        heir, carried = plan.sources[number], plan.debts[number]
        here = branch.positions[index]
        left = source.order.rows(here.epoch, 1) - here.row * length
        left += heir.order.tokens - source.order.tokens
        if here.row == 0 and heir.start.epoch < here.epoch:
            left = heir.order.tokens - source.order.tokens  # an epoch that was over
        taken_up = heir.order.rows(heir.start.epoch, 1) - heir.start.row * first
        sibling = _taken(branch.stream, index, branch.row)
        mine = _taken(stream, number, plan.first_row)
        found.append(
            InheritedSource(
                source=source.name,
                stands_at=epochs_consumed(source.order, here, length),
                passed_over=left if heir.start.epoch > here.epoch else left - taken_up,
                sibling_tokens=sum(_length(spans) for spans in sibling.values()),
                shared_tokens=sum(
                    _length(_common(spans, mine[epoch]))
                    for epoch, spans in sibling.items()
                    if epoch in mine
                ),
                owed=round(carried),
                written_off=round(owed[number] - carried),
            )
        )
    return Continuation(
        plan=before.hash, row=branch.row, step=branch.step, token=branch.token, sources=tuple(found)
    )


def _taken(stream: Stream, source: int, first: int) -> dict[int, Int64]:
    """By epoch, the tokens of a source that the rows from `first` on take, as spans in order."""
    order = stream.plan.sources[source].order
    found: dict[int, list[Int64]] = {}
    for span in stream.spans:
        if span.last_row <= first:
            continue
        begun = int(stream.counts(max(first, span.first_row))[source] - span.counts[source])
        ended = int(stream.counts(span.last_row)[source] - span.counts[source])
        position = order.advance(span.starts[source], span.length, begun)
        for epoch, spans in order.taken(position, span.length, ended - begun):
            found.setdefault(epoch, []).append(spans)
    return {
        epoch: (whole := np.concatenate(parts))[np.argsort(whole[:, 0])]
        for epoch, parts in found.items()
    }


def _common(one: Int64, other: Int64) -> Int64:
    """What two lists of spans, each in order and without overlaps, have in common."""
    edges = np.unique(np.concatenate([one.ravel(), other.ravel()]))
    inside = [
        np.searchsorted(spans[:, 0], edges[:-1], side="right")
        > np.searchsorted(spans[:, 1], edges[:-1], side="right")
        for spans in (one, other)
    ]
    both = inside[0] & inside[1]
    return np.stack([edges[:-1][both], edges[1:][both]], axis=1)


def _length(spans: Int64) -> int:
    return int((spans[:, 1] - spans[:, 0]).sum())
