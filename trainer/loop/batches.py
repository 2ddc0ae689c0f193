"""What the loop needs of a plan and its loader. A mixture's plan has it, and so do random rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from ...dataplane.order.timeline import PhaseRows

if TYPE_CHECKING:
    import torch

    from ...dataplane.order.plan import Plan as MixturePlan
    from .synthetic import SyntheticPlan

Plan: TypeAlias = "MixturePlan | SyntheticPlan"


PADDING = -1
"""The number of a row that does not exist."""


class MicroBatch(Protocol):
    """Some rows of one process; those that do not exist are padding of weight 0."""

    @property
    def tokens(self) -> torch.Tensor: ...
    @property
    def targets(self) -> torch.Tensor: ...
    @property
    def weights(self) -> torch.Tensor: ...
    @property
    def cu_seqlens(self) -> torch.Tensor: ...
    @property
    def rows(self) -> Iterable[int]: ...
    @property
    def sources(self) -> Iterable[int]: ...
    @property
    def digests(self) -> list[bytes]: ...


Steps = Callable[[int, int], Iterator[Sequence[MicroBatch]]]
"""From a step on, with micro-batches of so many rows: each step's micro-batches of this rank."""


def micro_rows(tokens: int, phase: PhaseRows, dp: int, cp: int = 1) -> int:
    """Rows of a micro-batch: as many as `tokens` allows and a rank has, evenly. Of each row, a
    process has one of `cp` parts."""
    share = ceil_div(phase.batch_rows, dp)
    most = max(1, min(tokens * cp // phase.seq_len, share))
    return ceil_div(share, ceil_div(share, most))


def micro_batches(rows: int, phase: PhaseRows, dp: int) -> int:
    """How many micro-batches of `rows` rows every rank has in a step."""
    return ceil_div(ceil_div(phase.batch_rows, dp), rows)


def ceil_div(a: int, b: int) -> int:
    return (a + b - 1) // b
