"""Statistics of a step, gathered from all ranks in one message through host memory.

Losses by source, the digests of the rows, the wait for data, and requests to stop. Every rank adds
up the same numbers in the same order, so all ranks reach the same decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...dataplane.runlog.ledger import DIGEST_BYTES
from ..layout.groups import Parallel
from .batches import PADDING, MicroBatch

SUMS = 2
"""Numbers of each rank that are summed beside the sources': rows that its experts received, and
layers with experts."""
FLAGS = 4
"""Numbers of each rank of which the greatest counts: data wait, stop, save failed, rows that its
experts received in one layer."""


@dataclass(frozen=True)
class StepStats:
    """Statistics of one step over all ranks."""

    losses: list[float]
    """Σ w·ℓ by source."""
    weights: list[float]
    """Σ w by source."""
    rows: list[int]
    """Rows by source."""
    data_wait: float
    """Longest wait of a rank for its rows, in seconds."""
    stop: bool
    """True if any rank was asked to stop."""
    save_failed: bool
    """True if the background save of any rank failed."""
    digests: list[bytes]
    """Digests of the step's rows, in global order."""
    expert_load: float | None = None
    """Rows that the experts of a rank received in a layer: the most of any rank and layer, in
    multiples of the mean. None without expert parallelism."""

    @property
    def loss(self) -> float:
        return sum(self.losses) / max(sum(self.weights), 1e-30)


def gather(
    batches: Sequence[MicroBatch],
    losses: Sequence[torch.Tensor],
    sources: int,
    parallel: Parallel,
    *,
    data_wait: float = 0.0,
    stop: bool = False,
    save_failed: bool = False,
    received: Sequence[int] = (),
) -> StepStats:
    """Gather the statistics of this rank's micro-batches from all ranks. Collective.

    `losses` are Σ w·ℓ by row for each micro-batch: this rank's contribution to them. Weights and
    row numbers that several ranks hold are reported by one of them. `received` are the rows that
    this rank's experts received, by layer.
    """
    group = parallel.control
    by_source = torch.zeros(3, sources, dtype=torch.float64)
    for batch, row_losses in zip(batches, losses, strict=True):
        source = torch.as_tensor(list(batch.sources), dtype=torch.int64)
        weights = batch.weights.sum(dim=1) * parallel.counts_tokens
        drawn = torch.tensor([int(row) != PADDING and parallel.reports_rows for row in batch.rows])
        for kind, numbers in enumerate((row_losses, weights, drawn)):
            by_source[kind].index_add_(0, source, numbers.double().cpu())
    rows = [int(row) for batch in batches for row in batch.rows]
    real = [row for row in rows if row != PADDING and parallel.reports_rows]
    digests = b"".join(
        digest for batch in batches for digest in batch.digests if parallel.reports_rows
    )
    assert len(digests) == len(real) * DIGEST_BYTES
    sums = torch.tensor([sum(received), len(received)], dtype=torch.float64)
    most = max(received, default=0)
    flags = torch.tensor([data_wait, stop, save_failed, most], dtype=torch.float64)
    padded = digests.ljust(len(rows) * DIGEST_BYTES, b"\0")
    message = torch.cat(
        [
            torch.cat([by_source.flatten(), sums, flags]).view(torch.uint8),
            torch.tensor(real + [PADDING] * (len(rows) - len(real))).view(torch.uint8),
            torch.frombuffer(bytearray(padded), dtype=torch.uint8),
        ]
    )
    messages = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    dist.all_gather(messages, message, group=group)
    return _sum(messages, sources, len(rows))


def _sum(messages: Sequence[torch.Tensor], sources: int, rows: int) -> StepStats:
    """Sum the messages of all ranks, in the order of the ranks."""
    summed = 3 * sources + SUMS
    totals = torch.zeros(summed, dtype=torch.float64)
    flags: list[torch.Tensor] = []
    digest_of: dict[int, bytes] = {}
    for message in messages:
        cut = 8 * (summed + FLAGS)
        floats = message[:cut].view(torch.float64)
        totals += floats[:summed]
        flags.append(floats[summed:])
        numbers = message[cut : cut + 8 * rows].view(torch.int64).tolist()
        digests = bytes(message[cut + 8 * rows :].tolist())
        for place, row in enumerate(numbers):
            if row != PADDING:
                digest_of[row] = digests[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
    waits, stops, failures, most = torch.stack(flags).max(dim=0).values.tolist()
    losses, weights, counts = totals[:-SUMS].view(3, sources).tolist()
    received, layers = totals[-SUMS:].tolist()
    return StepStats(
        losses=losses,
        weights=weights,
        rows=[int(count) for count in counts],
        data_wait=waits,
        stop=bool(stops),
        save_failed=bool(failures),
        digests=[digest_of[row] for row in sorted(digest_of)],
        expert_load=most * layers / received if received else None,
    )
