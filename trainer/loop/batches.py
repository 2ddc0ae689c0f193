"""Protocols between the loop and the data: plans and micro-batches, and the latter's sizes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ...dataplane.order.timeline import PhaseRows, PlanStep

if TYPE_CHECKING:
    import torch

    from ...dataplane.arrays import Int64

PADDING = -1
"""Row number of padding."""


class Named(Protocol):
    @property
    def name(self) -> str: ...


class RunPlan(Protocol):
    """A run's plan, for a mixture or for synthetic rows."""

    @property
    def phases(self) -> Sequence[PhaseRows]: ...
    @property
    def sources(self) -> Sequence[Named]: ...
    @property
    def lengths(self) -> Sequence[int]: ...
    @property
    def hash(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def first_step(self) -> int: ...
    @property
    def end_step(self) -> int: ...
    @property
    def steps(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def first_token(self) -> int: ...
    @property
    def end_token(self) -> int: ...
    def step(self, number: int) -> PlanStep[PhaseRows]: ...


class MicroBatch(Protocol):
    """Rows on which a rank computes at once; padding rows have weight 0.

    `rows` and `sources` are those of the plan: a row of the plan may be cut into several rows of
    the tensors (`Plan.lengths`).
    """

    @property
    def tokens(self) -> torch.Tensor: ...
    @property
    def targets(self) -> torch.Tensor: ...
    @property
    def weights(self) -> torch.Tensor: ...
    @property
    def cu_seqlens(self) -> torch.Tensor: ...
    @property
    def documents(self) -> Int64: ...
    @property
    def rows(self) -> Collection[int]: ...
    @property
    def sources(self) -> Collection[int]: ...
    @property
    def digests(self) -> list[bytes]: ...


class Mixing(Protocol):
    """The shares that a run has decided (mixing/)."""

    @property
    def state(self) -> Mapping[str, Any]:
        """What a checkpoint keeps."""

    def digest(self, row: int) -> bytes:
        """Return the digest of the decision from `row` on; empty if there is none."""


Steps = Callable[[int, int], Iterator[Sequence[MicroBatch]]]
"""Maps (first step, rows per micro-batch) to this rank's micro-batches, step by step."""


def micro_rows(tokens: int, phase: PhaseRows, dp: int, cp: int = 1) -> int:
    """Return the rows per micro-batch: at most `tokens` tokens per rank, evenly divided.

    A rank holds 1/cp of a row's tokens.
    """
    whole = phase.whole  # its rows are divided among ranks, before they are cut into pieces
    rank_rows = ceil_div(whole.batch_rows, dp)
    max_rows = max(1, min(tokens * cp // whole.seq_len, rank_rows))
    rows = ceil_div(rank_rows, ceil_div(rank_rows, max_rows))
    return rows * (whole.seq_len // phase.seq_len)


def micro_batches(rows: int, phase: PhaseRows, dp: int) -> int:
    """Return the number of micro-batches with `rows` rows per rank and step."""
    whole = phase.whole
    pieces = whole.seq_len // phase.seq_len
    return ceil_div(ceil_div(whole.batch_rows, dp) * pieces, rows)


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b
