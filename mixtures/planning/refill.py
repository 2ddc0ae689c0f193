"""Refill the rows that hold documents to leave out: each gets the tokens of a row of its source
that follows the plan's last, so that every other row stays in its place, to the bit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ...dataplane.arrays import Int64
from ...dataplane.order.refills import Refill
from ...dataplane.order.stream import RowLocations, Stream
from ..mixture_file.check import MixtureFinding

BLOCK_DRAWS = 4096
"""Draws located together."""


def refill_rows(stream: Stream) -> tuple[Stream, list[MixtureFinding]]:
    """Return the stream with the rows of unlearnt tokens refilled, and what makes it impossible."""
    plan = stream.plan
    if len(stream.spans) > 1:
        problem = "all phases must have the same seq_len: a row of another length fits no place"
        return stream, [MixtureFinding(("refill",), problem)]
    sources, findings = [], []
    for index, source in enumerate(plan.sources):
        draws = _find_draws(stream, index)
        substitutes = _find_substitutes(stream, index, len(draws))
        if len(substitutes) < len(draws):
            findings.append(
                MixtureFinding(
                    ("refill",),
                    f"{source.name}: {len(draws):,} rows hold documents to leave out, and "
                    f"{len(substitutes):,} rows are left to refill them; raise its max_epochs",
                )
            )
        refills: list[Refill] = list(zip(draws.tolist(), substitutes, strict=False))
        sources.append(replace(source, refills=tuple(refills)))
    return Stream(replace(plan, sources=tuple(sources))), findings


def _find_draws(stream: Stream, index: int) -> Int64:
    """Return the source's draws whose rows hold unlearnt tokens, sorted."""
    spans = np.array(stream.plan.sources[index].unlearnt, np.int64).reshape(-1, 2)
    _, rows = stream.find_rows(index, spans[:, 0], spans[:, 1])
    _, draws = stream.assignment.locate(np.unique(rows) - stream.plan.first_row)
    return np.sort(draws)


def _find_substitutes(stream: Stream, index: int, count: int) -> list[int]:
    """Return the first draws after the plan's last whose rows hold no unlearnt tokens: `count`, or
    fewer if the source runs dry."""
    source, [span] = stream.plan.sources[index], stream.spans
    spans = np.array(source.unlearnt, np.int64).reshape(-1, 2)
    supply = source.order.rows_left(source.start, span.length, source.max_epochs)
    first, substitutes = int(stream.counts(span.end_row)[index]), list[int]()
    while len(substitutes) < count and first < supply:
        draws = np.arange(first, min(first + BLOCK_DRAWS, supply))
        numbers = np.full(len(draws), index, np.int32)
        reads = RowLocations(
            draws, span.length, numbers, *span.draws.locate(numbers, draws)
        ).reads()
        overlaps = spans[:, 1].searchsorted(reads.starts, side="right") < spans[:, 0].searchsorted(
            reads.ends
        )
        substitutes += np.setdiff1d(draws, draws[reads.rows[overlaps]]).tolist()
        first += BLOCK_DRAWS
    return substitutes[:count]
