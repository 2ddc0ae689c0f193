"""How ranks share a micro-batch; the two directions of a pass."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ...models.config.options.names import AttentionForm, DeltaForm, LongFilterForm, RowForms

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Split:
    """Rows per micro-batch, and the ranks that share them."""

    rows: int = 1
    tp: int = 1
    cp: int = 1
    attention: AttentionForm = "a2a"
    hyena_li: LongFilterForm = "states"
    delta: DeltaForm = "states"

    @property
    def row_forms(self) -> RowForms:
        """How operators work on rows that ranks share."""
        return {"attention": self.attention, "hyena_li": self.hyena_li, "delta": self.delta}

    @property
    def ranks(self) -> int:
        return self.tp * self.cp

    @property
    def context_only(self) -> Split:
        """The same ranks, all on the context axis."""
        return replace(self, tp=1, cp=self.ranks)
