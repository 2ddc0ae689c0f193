"""How often the rows behind a run's weights served each token of a source.

    token spans of the rows, epoch by epoch  ──►  a step function over the source's tokens

Rows are not read: their spans follow from the order. Steps that were skipped or rolled back do not
count.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...dataplane.arrays import Int64
from ...dataplane.order.stream import Stream
from ..exposure.lineage import Lineage, ServedRows


@dataclass(frozen=True, eq=False)
class ServedTokens:
    """A step function: from token `edges[i]` on, tokens were served `times[i]` times."""

    edges: Int64
    times: Int64
    """The last one is 0."""

    @classmethod
    def from_spans(cls, spans: Int64) -> ServedTokens:
        """Add up spans [n, 2] that may overlap."""
        edges, edge_ids = np.unique(np.append(spans.ravel(), 0), return_inverse=True)
        changes = np.zeros(len(edges), np.int64)
        np.add.at(changes, edge_ids[:-1], np.tile([1, -1], len(spans)))
        return cls(edges, np.cumsum(changes))

    def count(self, starts: Int64, ends: Int64) -> Int64:
        """Count how many times tokens of [starts[i], ends[i]) were served, for all i."""
        return _integrate(self.edges, self.times, ends) - _integrate(self.edges, self.times, starts)

    def count_distinct(self, starts: Int64, ends: Int64) -> Int64:
        """Count the tokens of [starts[i], ends[i]) that were served at least once."""
        served = np.minimum(self.times, 1)
        return _integrate(self.edges, served, ends) - _integrate(self.edges, served, starts)


def _integrate(edges: Int64, heights: Int64, positions: Int64) -> Int64:
    """Integrate a step function from 0 to positions."""
    areas = np.cumsum(np.diff(edges, prepend=0) * np.append(0, heights[:-1]))
    steps = np.searchsorted(edges, positions, side="right") - 1
    total: Int64 = areas[steps] + heights[steps] * (positions - edges[steps])
    return total


def count_served(lineage: Lineage, source: str) -> ServedTokens:
    """Count the tokens of a source over all rows of a lineage."""
    spans = [np.empty((0, 2), np.int64)]
    for served in lineage.served:
        names = [plan_source.name for plan_source in served.plan.sources]
        if source in names:
            for first_row, end_row in kept_rows(served):
                spans += _find_spans(served.stream, names.index(source), first_row, end_row)
    return ServedTokens.from_spans(np.concatenate(spans))


def kept_rows(served: ServedRows) -> Iterator[tuple[int, int]]:
    """Yield the ranges of rows that the weights hold; without a ledger, all that are planned."""
    plan = served.plan
    end_row = served.end_row
    if served.taken_rows is not None:
        end_row = min(end_row, served.taken_rows)
    row = plan.first_row
    for first, end in sorted(served.undone_steps.tolist()):
        first_row, after_row = plan.step(first).first_row, plan.step(end - 1).end_row
        if row < first_row:
            yield row, first_row
        row = max(row, after_row)
    if row < end_row:
        yield row, end_row


def _find_spans(stream: Stream, source: int, first_row: int, end_row: int) -> Iterator[Int64]:
    """Yield a source's token spans in the rows [first_row, end_row)."""
    for span in stream.spans:
        low, high = max(first_row, span.first_row), min(end_row, span.end_row)
        if low >= high:
            continue
        first, end = (int(stream.counts(row)[source] - span.counts[source]) for row in (low, high))
        position = span.orders[source].advance(span.starts[source], span.length, first)
        for _, spans in span.orders[source].served_spans(position, span.length, end - first):
            yield spans
