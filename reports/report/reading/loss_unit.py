"""Choose the loss unit for several runs: nats per token, or bits per byte if tokenizers differ.

Tokens from different tokenizers span different text, so losses per token cannot be subtracted. A
step's bits per byte follow from the loss, the sources' bytes per token, and the sources' weights.
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
    """None if the runs' losses cannot be compared."""
    note: str | None
    """Why the unit is not nats per token."""
    sizes: Sequence[ByteSizes | None]
    """Bytes per token by run; None for a run whose losses are not converted."""

    @property
    def shown(self) -> str:
        return self.name or APART


def common_unit(runs: Sequence[StoredRun]) -> LossUnit:
    """Return a loss unit for all runs.

    The unit has no name if the tokenizers differ and a dataset cannot be read: then losses are not
    converted and cannot be compared.
    """
    unconverted = [None] * len(runs)
    if len({run.tokenizer for run in runs}) == 1:
        return LossUnit(NATS, None, unconverted)
    try:
        return LossUnit(BITS, CONVERTED, [run.measured_sizes() for run in runs])
    except UserError as error:
        return LossUnit(None, INCOMPARABLE.format(error.message), unconverted)
