"""Degrees of parallelism.

ranks = dp × cp × tp        data parallel × context parallel × tensor parallel

Experts are split over the innermost ep of these ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...console.errors import LayoutError
from ...models.parallel.axes import AttentionForm, LongFilterForm


@dataclass(frozen=True, kw_only=True)
class LayoutConfig:
    """Degrees of parallelism. Data parallelism takes the ranks that TP and CP leave."""

    tp: int = 1
    """Tensor parallel: ranks that shard every matrix."""
    cp: int = 1
    """Context parallel: ranks that shard every row."""
    ep: int = 1
    """Expert parallel: ranks that split the experts of each `moe` layer. 1, or a multiple of tp
    that divides dp × cp × tp."""
    attention: AttentionForm = "a2a"
    """Attention over a sharded row: `a2a` gives each rank whole rows of some heads, `ring` passes
    keys and values from rank to rank."""
    hyena_li: LongFilterForm = "states"
    """Modal filters of Hyena-LI over a sharded row: `states` passes filter states to the next rank,
    `a2a` gives each rank whole rows of some channels."""

    def __post_init__(self) -> None:
        for axis in ("tp", "cp", "ep"):
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis} must be at least 1, not {getattr(self, axis)}")

    def data_parallel(self, processes: int) -> int:
        """Return the data-parallel degree on so many processes."""
        model = self.tp * self.cp
        if processes % model:
            raise LayoutError(
                f"layout.tp={self.tp} × layout.cp={self.cp} does not divide {processes} process"
                f"{'es' * (processes > 1)}",
                hint=f"use processes={model} or a multiple of it, or a smaller layout",
            )
        return processes // model
