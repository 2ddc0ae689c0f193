"""The losses of a run's documents, a line for each step.

    {"step": 120, "loss": 91840.5, "pieces": [[968, 17, 2310.25, 512.0], …]}

`loss` is Σ w·ℓ over the step. A piece is a document's part of a row: row, first token in the row,
Σ w·ℓ and Σ w (as `loss_divisor` counts). A line has the pieces with the largest losses, the largest
first; that of a spike or a skipped step has all. The plan resolves a row and a token to a document.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..storage import storage
from .reader import StepLines, has_step

NAME = "documents.jsonl"
DIGITS = 9
"""Significant digits of a recorded sum."""


class PieceLoss(NamedTuple):
    """The loss of a document's piece in a row."""

    row: int
    first: int
    """First token, counted in the row."""
    loss: float
    """Σ w·ℓ of the cross entropy; NaN if it is not finite."""
    weight: float
    """Σ w, as `loss_divisor` counts."""

    @property
    def mean(self) -> float:
        return self.loss / self.weight


class RecordedPieces(NamedTuple):
    """A step's recorded pieces."""

    step: int
    loss: float
    """Σ w·ℓ over the step; NaN if it is not finite."""
    pieces: list[PieceLoss]


def encode_step(step: int, loss: float, pieces: Sequence[PieceLoss]) -> dict[str, Any]:
    """Return the line of a step."""
    return {
        "step": step,
        "loss": _round(loss),
        "pieces": [[p.row, p.first, _round(p.loss), _round(p.weight)] for p in pieces],
    }


def find_step(file: str | Path, step: int) -> RecordedPieces | None:
    """Return a step's pieces; None if the run has recorded none."""
    if not storage.exists(str(file)):
        return None
    with StepLines(file, _is_whole) as lines:
        _, line = lines.find(step)
    return None if line is None or line["step"] != step else _decode(line)


def read_steps(file: str | Path) -> Iterator[RecordedPieces]:
    """Yield the steps of a run."""
    with StepLines(file, _is_whole) as lines:
        yield from map(_decode, lines)


def _decode(line: dict[str, Any]) -> RecordedPieces:
    pieces = [
        PieceLoss(row, first, _number(loss), weight) for row, first, loss, weight in line["pieces"]
    ]
    return RecordedPieces(line["step"], _number(line["loss"]), pieces)


def _round(number: float) -> float | None:
    """Round to `DIGITS`; None if the number is not finite, which JSON cannot write."""
    return float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None


def _number(number: float | None) -> float:
    return math.nan if number is None else number


def _is_whole(line: dict[str, Any]) -> bool:
    return has_step(line) and isinstance(line.get("pieces"), list) and "loss" in line
