"""The pieces of documents in a plan's rows: the inverse of the order, for many documents at once.

    document → tokens of its source → epoch, row → the piece of the document in the row

A piece is a span of the document's tokens that are inputs of one row. Its loss weight is the weight
of the row's targets that are tokens of the document.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...dataplane.arrays import Float64, Int64, expand_ranges
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.loader.unlearnt import find_unlearnt, unlearnt_spans
from ...dataplane.order.stream import RowLocations, Stream


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of documents, sorted by document, row and token. All arrays are [pieces]."""

    documents: Int64
    """Index into the documents that were searched."""
    rows: Int64
    epochs: Int64
    first: Int64
    """First token, counted in the document."""
    tokens: Int64
    at: Int64
    """First token, counted in the row."""
    weights: Float64


def find_pieces(
    stream: Stream, source: int, dataset: Dataset, numbers: Int64, end_row: int
) -> Pieces:
    """Find the pieces of the documents `numbers` in the rows before `end_row`."""
    starts, ends = dataset.document_spans(numbers)
    documents, rows = stream.find_rows(source, starts, ends)
    is_before = rows < end_row
    documents, rows = documents[is_before], rows[is_before]
    columns = [np.empty((8, 0), np.int64)]
    for span in stream.spans:
        in_span = (rows >= span.first_row) & (rows < span.end_row)
        distinct, row_ids = np.unique(rows[in_span], return_inverse=True)
        if len(distinct):
            located = stream.locate(distinct)
            columns.append(
                _cut_pieces(
                    located,
                    documents[in_span],
                    row_ids,
                    starts,
                    ends,
                    isolated=stream.plan.isolate_documents,
                )
            )
    table = np.concatenate(columns, axis=1)
    documents, rows, *_, at, target_starts, target_ends = table
    order = np.lexsort([at, rows, documents])
    weights = _sum_weights(dataset, target_starts, target_ends)
    if (unlearnt := unlearnt_spans(stream.plan.sources)).get(source) is not None:
        weights[find_unlearnt(unlearnt[source], starts[documents])] = 0.0
    documents, rows, epochs, first, tokens, at = table[:6, order]
    return Pieces(documents, rows, epochs, first, tokens, at, weights[order])


def _cut_pieces(
    located: RowLocations,
    documents: Int64,
    row_ids: Int64,
    starts: Int64,
    ends: Int64,
    *,
    isolated: bool,
) -> Int64:
    """Cut documents to the input spans of rows, for pairs of a document and a row.

    Returns [8, pieces]: document, row, epoch, first token, tokens, position in the row, and the
    range of targets that belong to the document.
    """
    reads = located.reads()
    first_spans, end_spans = (
        np.searchsorted(reads.rows, row_ids, side=side) for side in ("left", "right")
    )
    pairs, spans = expand_ranges(first_spans, end_spans)
    is_last = spans == end_spans[pairs] - 1
    span_starts, span_ends = reads.starts[spans], reads.ends[spans] - is_last
    documents, row_ids = documents[pairs], row_ids[pairs]
    low = np.maximum(span_starts, starts[documents])
    high = np.minimum(span_ends, ends[documents])
    # The token after an input is its target, also the last one's of a row. It is masked where a
    # row's next span begins, and where a document begins that is isolated from the one before.
    has_first_target = (low == starts[documents]) & (low > span_starts) & (not isolated)
    columns: Int64 = np.stack(
        [
            documents,
            located.rows[row_ids],
            located.epochs[row_ids],
            low - starts[documents],
            high - low,
            reads.offsets[spans] + low - span_starts,
            low + 1 - has_first_target,
            np.minimum(high + is_last, ends[documents]),
        ]
    )
    pieces: Int64 = columns[:, low < high]
    return pieces


def _sum_weights(dataset: Dataset, starts: Int64, ends: Int64) -> Float64:
    """Sum the loss weights of the tokens [starts[i], ends[i]), for all i."""
    table = dataset.weight_table
    if table is None:
        return (ends - starts).astype(np.float64)
    return np.array(
        [
            sum(float(table[codes].sum(dtype=np.float64)) for codes in dataset.codes(start, end))
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        ],
        np.float64,
    )
