"""Operations of a layer, by the rows of a hardware file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

WorkKind = Literal["matmul", "attention", "kernel", "memory"]


@dataclass(frozen=True)
class Work:
    """Operations of one shape, for a row of one sequence on one rank."""

    kind: WorkKind
    name: str
    """Kernel of the operation; empty for the others."""
    shape: tuple[int, ...]
    """matmul: (groups, m, k, n); attention: (head width, heads, length, heads of keys); kernel:
    (size, width, length), as in the hardware file; memory: ()."""
    count: int
    """Number of such operations."""
    bytes: int
    """Bytes that one operation reads and writes."""
    saved: str = ""
    """Kind of result by the names of `recompute: {save: …}`."""
