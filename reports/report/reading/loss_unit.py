"""Unit of the losses of several runs: nats per token, or bits per byte if tokenizers differ.

A token of another tokenizer is another piece of text, so losses per token cannot be subtracted. A
step's bits per byte follow from its loss, the bytes per token of each source, and the weights of
its sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....console.errors import UserError
from ...board.byte_sizes import APART, BITS, CONVERTED, INCOMPARABLE, NATS, ByteSizes
from .stored import StoredRun


@dataclass(frozen=True)
class LossUnit:
    name: str | None
    """None if the losses of the runs cannot be compared."""
    note: str | None
    """Reason for which the unit is not nats per token."""
    sizes: Sequence[ByteSizes | None]
    """Bytes per token of each run whose losses are converted."""

    @property
    def shown(self) -> str:
        return self.name or APART


def common_unit(runs: Sequence[StoredRun]) -> LossUnit:
    """Return one unit for the losses of all runs.

    It has no name if the tokenizers differ and a dataset cannot be read: the losses of the runs
    stay as they are and cannot be compared.
    """
    alone = [None] * len(runs)
    if len({run.tokenizer for run in runs}) == 1:
        return LossUnit(NATS, None, alone)
    try:
        return LossUnit(BITS, CONVERTED, [run.measured_sizes() for run in runs])
    except UserError as error:
        return LossUnit(None, INCOMPARABLE.format(error.what), alone)
