"""Micro-batch and layout for which a rank's memory is counted."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..config.options.names import (
    AttentionForm,
    DeltaForm,
    LinearForm,
    LongFilterForm,
    RowForms,
)
from ..config.options.precision import Precision
from .state import Degrees


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A rank's micro-batch: rows, precision, device and layout."""

    rows: int
    """Rows in a micro-batch, before tp and cp divide them."""
    seq_len: int
    precision: Precision
    device: str
    degrees: Degrees = field(default_factory=Degrees)
    attention: AttentionForm = "a2a"
    hyena_li: LongFilterForm = "states"
    delta: DeltaForm = "states"
    linear: LinearForm = "torch"
    """The engine's linear function."""
    threads: int = 1
    """CPU threads per rank: attention allocates scores per thread."""

    @property
    def row_forms(self) -> RowForms:
        """How operators work on rows that ranks share."""
        return {"attention": self.attention, "hyena_li": self.hyena_li, "delta": self.delta}
