"""What the ranks tell each other about a step, in one small message through host memory.

Losses by source, the digests of the rows, how long the data took, and whether a rank was asked to
stop. Every rank adds up the same numbers in the same order, so that all come to one conclusion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ...dataplane.runlog.ledger import DIGEST_BYTES
from ..layout.layout import Parallel
from .batches import PADDING, MicroBatch

FLAGS = 3


@dataclass(frozen=True)
class Facts:
    """A step, as all ranks together know it."""

    losses: list[float]
    """Σ w·ℓ by source."""
    weights: list[float]
    """Σ w by source."""
    rows: list[int]
    """How many rows each source gave."""
    data_wait: float
    """The longest that a rank waited for its rows, in seconds."""
    stop: bool
    """Some rank was asked to stop."""
    save_failed: bool
    """Some rank's background save has failed."""
    digests: list[bytes]
    """Of the step's rows, in global order."""

    @property
    def loss(self) -> float:
        return sum(self.losses) / max(sum(self.weights), 1e-30)


def exchange(
    batches: Sequence[MicroBatch],
    losses: Sequence[torch.Tensor],
    sources: int,
    parallel: Parallel,
    *,
    data_wait: float = 0.0,
    stop: bool = False,
    save_failed: bool = False,
) -> Facts:
    """Of this rank's micro-batches, with Σ w·ℓ of each row: this rank's share of it. What several
    ranks have, one of them tells. Collective."""
    group = parallel.control
    by_source = torch.zeros(3, sources, dtype=torch.float64)
    for batch, each in zip(batches, losses, strict=True):
        source = torch.as_tensor(list(batch.sources), dtype=torch.int64)
        weights = batch.weights.sum(dim=1) * parallel.counted
        drawn = torch.tensor([int(row) != PADDING and parallel.tells for row in batch.rows])
        for kind, numbers in enumerate((each, weights, drawn)):
            by_source[kind].index_add_(0, source, numbers.double().cpu())
    rows = [int(row) for batch in batches for row in batch.rows]
    real = [row for row in rows if row != PADDING and parallel.tells]
    digests = b"".join(digest for batch in batches for digest in batch.digests if parallel.tells)
    assert len(digests) == len(real) * DIGEST_BYTES
    flags = torch.tensor([data_wait, float(stop), float(save_failed)], dtype=torch.float64)
    padded = digests.ljust(len(rows) * DIGEST_BYTES, b"\0")
    message = torch.cat(
        [
            torch.cat([by_source.flatten(), flags]).view(torch.uint8),
            torch.tensor(real + [PADDING] * (len(rows) - len(real))).view(torch.uint8),
            torch.frombuffer(bytearray(padded), dtype=torch.uint8),
        ]
    )
    answers = [torch.empty_like(message) for _ in range(dist.get_world_size(group))]
    dist.all_gather(answers, message, group=group)

    count = len(rows)
    numbers = torch.zeros(3 * sources, dtype=torch.float64)
    told: list[torch.Tensor] = []
    by_row: dict[int, bytes] = {}
    for answer in answers:
        cut = 8 * (3 * sources + FLAGS)
        floats = answer[:cut].view(torch.float64)
        numbers += floats[: 3 * sources]
        told.append(floats[3 * sources :])
        numbered = answer[cut : cut + 8 * count].view(torch.int64).tolist()
        digested = bytes(answer[cut + 8 * count :].tolist())
        for place, row in enumerate(numbered):
            if row != PADDING:
                by_row[row] = digested[place * DIGEST_BYTES : (place + 1) * DIGEST_BYTES]
    waits, stops, failures = torch.stack(told).max(dim=0).values.tolist()
    return Facts(
        losses=numbers[:sources].tolist(),
        weights=numbers[sources : 2 * sources].tolist(),
        rows=[int(count) for count in numbers[2 * sources :].tolist()],
        data_wait=waits,
        stop=bool(stops),
        save_failed=bool(failures),
        digests=[by_row[row] for row in sorted(by_row)],
    )
