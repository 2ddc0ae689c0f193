"""Take the loss off the tokens that a plan's sources name as unlearnt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..arrays import Int64, expand_ranges
from ..order.plan import PlanSource
from ..order.stream import RowLocations
from .row_weights import Float32


def unlearnt_spans(sources: Sequence[PlanSource]) -> dict[int, Int64]:
    """Return the token spans [n, 2] by source index, for sources that have any."""
    return {
        index: np.array(source.unlearnt, np.int64)
        for index, source in enumerate(sources)
        if source.unlearnt
    }


def find_unlearnt(spans: Int64, tokens: Int64) -> npt.NDArray[np.bool_]:
    """Return, for each token of a source, whether it lies within the spans."""
    index = np.searchsorted(spans[:, 1], tokens, side="right")
    is_unlearnt: npt.NDArray[np.bool_] = (index < len(spans)) & (
        spans[np.minimum(index, len(spans) - 1), 0] <= tokens
    )
    return is_unlearnt


def mask_unlearnt(weights: Float32, located: RowLocations, unlearnt: Mapping[int, Int64]) -> None:
    """Set the weights [rows, length] of targets within the spans to 0."""
    reads = located.reads()
    for source, spans in unlearnt.items():
        read_ids = np.flatnonzero(located.sources[reads.rows] == source)
        first = np.searchsorted(spans[:, 1], reads.starts[read_ids], side="right")
        end = np.searchsorted(spans[:, 0], reads.ends[read_ids], side="left")
        owners, span_ids = expand_ranges(first, end)
        read_ids = read_ids[owners]
        columns = reads.offsets[read_ids] - reads.starts[read_ids] - 1  # of a token, as a target
        low = columns + np.maximum(spans[span_ids, 0], reads.starts[read_ids])
        high = columns + np.minimum(spans[span_ids, 1], reads.ends[read_ids])
        for row, start, stop in zip(
            reads.rows[read_ids].tolist(), np.maximum(low, 0).tolist(), high.tolist(), strict=True
        ):
            weights[row, start:stop] = 0.0
