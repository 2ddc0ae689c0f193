"""Rows by the plan alone, where their data cannot be read: source, epoch and token spans."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ...dataplane.order.stream import Stream

BLOCK_ROWS = 1024
"""Rows located together."""


@dataclass(frozen=True, kw_only=True)
class PlannedRow:
    """A row whose tokens are not read."""

    row: int
    step: int
    phase: str
    source: str
    epoch: int
    spans: tuple[tuple[int, int], ...]
    """Tokens [start, end) of the source that are inputs of the row."""

    def format_json(self) -> str:
        return json.dumps(
            {
                "row": self.row,
                "step": self.step,
                "phase": self.phase,
                "source": self.source,
                "epoch": self.epoch,
                "spans": self.spans,
            }
        )

    def format_text(self) -> str:
        spans = ", ".join(f"{start:,} to {end:,}" for start, end in self.spans)
        return (
            f"row {self.row:,} (step {self.step:,}, phase {self.phase}): source {self.source}, "
            f"epoch {self.epoch}, its tokens {spans}"
        )


def plan_rows(stream: Stream, rows: range) -> Iterator[PlannedRow]:
    """Yield rows by the plan."""
    plan = stream.plan
    for phase in plan.phases:
        first_row, end_row = max(rows.start, phase.first_row), min(rows.stop, phase.end_row)
        for start in range(first_row, end_row, BLOCK_ROWS):
            numbers = np.arange(start, min(start + BLOCK_ROWS, end_row))
            located = stream.locate(numbers)
            for index, row in enumerate(numbers.tolist()):
                yield PlannedRow(
                    row=row,
                    step=phase.first_step + (row - phase.first_row) // phase.batch_rows,
                    phase=phase.name,
                    source=plan.sources[int(located.sources[index])].name,
                    epoch=int(located.epochs[index]),
                    spans=tuple((int(low), int(high)) for low, high in located.spans(index)),
                )
