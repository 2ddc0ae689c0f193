"""Statistics of a step, gathered from all ranks in one message of a fixed size.

    Σ w·ℓ, Σ w, rows by source │ flags, largest pieces, metrics    │ row numbers │ digests
    fp64, 3 × sources          │ fp64, by their combinations       │ int64       │ 16 bytes each

Messages travel through host memory, after the last backward pass. Every rank adds the same numbers
in the same order, so all ranks reach the same decision. The gathered row numbers prove that the
ranks took exactly the step's rows, each once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ...console.errors import RunError
from ...dataplane.runlog.document_losses import PieceLoss
from ...dataplane.runlog.ledger import DIGEST_BYTES
from ...models.config.options.names import Divisor
from ..engines.objective import divisor_terms
from ..layout.groups import Parallel
from .batches import PADDING, MicroBatch
from .documents.largest import LargestPieces
from .metrics import Combination, Largest, add_in_order, combinations, mean

FLAGS: Mapping[str, Combination] = {
    "stop": Largest(),
    "save_failed": Largest(),
    "steered": Largest(),
}
"""Facts that hold for the step if they hold on any rank."""
PIECES = "pieces"
DIGEST_WORDS = DIGEST_BYTES // 8
MAX_SHOWN = 8
"""Maximum number of rows, and ranks per row, that an error lists."""


@dataclass(frozen=True)
class StepStats:
    """A step's statistics over all ranks."""

    losses: list[float]
    """Σ w·ℓ by source, without the z-loss."""
    weights: list[float]
    """Divisors by source: Σ w, or as `loss_divisor` says."""
    rows: list[int]
    """Rows by source."""
    digests: bytes
    """Concatenated digests of the step's rows, in global order."""
    stop: bool = False
    """True if any rank was asked to stop."""
    save_failed: bool = False
    """True if any rank's background save failed."""
    steered: bool = False
    """True if rank 0 has made a decision that the ranks do not know yet."""
    pieces: Sequence[PieceLoss] = ()
    """Pieces of documents with the largest losses, of a spike or a skipped step all; empty if the
    run records none."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Combined metrics by name, without those that no rank has measured."""

    @property
    def loss(self) -> float:
        """The mean cross entropy."""
        return mean(sum(self.losses), sum(self.weights))


def gather(
    batches: Sequence[MicroBatch],
    losses: Sequence[torch.Tensor],
    sources: int,
    expected: range,
    parallel: Parallel,
    divisor: Divisor = "weights",
    measured: Mapping[str, Any] | None = None,
) -> StepStats:
    """Gather the statistics of all ranks' micro-batches. Collective.

    `losses` is this rank's contribution to Σ w·ℓ by row, [rows] for each micro-batch. `measured`
    has this rank's flags, largest pieces and metrics, by name. Raises RunError on all ranks if they
    do not report the `expected` rows, each once.
    """
    message = encode(batches, losses, sources, parallel, divisor, measured or {})
    return combine(_exchange(message, parallel.control), sources, expected)


def encode(
    batches: Sequence[MicroBatch],
    losses: Sequence[torch.Tensor],
    sources: int,
    parallel: Parallel,
    divisor: Divisor,
    measured: Mapping[str, Any],
) -> torch.Tensor:
    """Return this rank's message, int64 [words]. If several ranks hold the same weights and row
    numbers, one of them reports these."""
    table = _table()
    assert measured.keys() <= table.keys(), f"{measured.keys() - table.keys()} have no combination"
    numbers: list[float] = []
    for key, combination in table.items():
        absent = [combination.absent] * combination.size
        numbers += combination.encode(measured[key]) if key in measured else absent
    sums = _sums(batches, losses, sources, parallel, divisor).flatten()
    floats = torch.cat([sums, torch.tensor(numbers, dtype=torch.float64)])
    return torch.cat([floats.view(torch.int64), _rows(batches, parallel)])


def total_weight(batches: Sequence[MicroBatch], parallel: Parallel, divisor: Divisor) -> float:
    """Return the divisor of the loss, over all ranks' micro-batches. Collective."""
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches if parallel.counts_tokens else ():
        total += divisor_terms(batch.weights, divisor).sum(dtype=torch.float64).cpu()
    dist.all_reduce(total, group=parallel.control)
    return float(total) or 1.0  # the loss of a fully masked batch is 0


def step_loss(
    batches: Sequence[MicroBatch],
    losses: Sequence[torch.Tensor],
    sources: int,
    parallel: Parallel,
    divisor: Divisor = "weights",
) -> float:
    """Compute the loss bit-identically to `gather`. Collective over the ranks that compute the
    loss: sums from other ranks are zeros.

    Sums by source are gathered, not reduced: a reduction adds in another order.
    """
    sums = _sums(batches, losses, sources, parallel, divisor)[:2].flatten()
    totals = add_in_order(_exchange(sums, parallel.pipe.last_stage)).view(2, sources)
    loss, weight = totals.tolist()
    return mean(sum(loss), sum(weight))


def combine(messages: torch.Tensor, sources: int, expected: range) -> StepStats:
    """Combine all ranks' messages, int64 [ranks, words]."""
    table = _table()
    sizes = [3 * sources, *(combination.size for combination in table.values())]
    size = (messages.shape[1] - sum(sizes)) // (1 + DIGEST_WORDS)
    floats, rows, digests = messages.split([sum(sizes), size, DIGEST_WORDS * size], dim=1)
    sums, *numbers = floats.view(torch.float64).split(sizes, dim=1)
    losses, weights, counts = add_in_order(sums).view(3, sources).tolist()
    metrics = {
        key: value
        for (key, combination), columns in zip(table.items(), numbers, strict=True)
        if (value := combination.combine(columns, sum(weights))) is not None
    }
    taken = rows != PADDING
    ordered, order = rows[taken].sort()
    if not torch.equal(ordered, torch.arange(expected.start, expected.stop)):
        raise _wrong_rows(ordered, taken.nonzero()[order, 0], expected)
    joined = bytearray(DIGEST_BYTES * len(expected))
    words = torch.frombuffer(joined, dtype=torch.int64).view(-1, DIGEST_WORDS)
    words.copy_(digests.unflatten(1, (size, DIGEST_WORDS))[taken][order])
    return StepStats(
        losses=losses,
        weights=weights,
        rows=[int(count) for count in counts],
        digests=bytes(joined),
        pieces=metrics.pop(PIECES, ()),
        **{flag: bool(metrics.pop(flag, False)) for flag in FLAGS},
        metrics=metrics,
    )


def _table() -> dict[str, Combination]:
    """Return how ranks combine what they measure, in the order of the message."""
    return {**FLAGS, PIECES: LargestPieces(), **combinations()}


def _sums(
    batches: Sequence[MicroBatch],
    losses: Sequence[torch.Tensor],
    sources: int,
    parallel: Parallel,
    divisor: Divisor,
) -> torch.Tensor:
    """Return this rank's Σ w·ℓ, divisors and rows by source, fp64 [3, sources]."""
    row_sources = torch.tensor([int(source) for batch in batches for source in batch.sources])
    sums_by_row = [divisor_terms(batch.weights, divisor).sum(dim=1) for batch in batches]
    weights = _sum_cuts(sums_by_row, batches) * parallel.counts_tokens
    drawn = torch.tensor([row != PADDING for batch in batches for row in batch.rows])
    sums = torch.zeros(3, sources, dtype=torch.float64)
    # Losses on a device take a single transfer for all micro-batches.
    by_row = (_sum_cuts(losses, batches), weights, drawn * parallel.reports_rows)
    for total, numbers in zip(sums, by_row, strict=True):
        total.index_add_(0, row_sources, numbers.double().cpu())
    return sums


def _sum_cuts(numbers: Sequence[torch.Tensor], batches: Sequence[MicroBatch]) -> torch.Tensor:
    """Sum over the rows of the model that one row of the plan was cut into."""
    sums = []
    for values, batch in zip(numbers, batches, strict=True):
        rows = len(batch.sources)
        sums.append(values if len(values) == rows else values.view(rows, -1).sum(1))
    return torch.cat(sums)


def _rows(batches: Sequence[MicroBatch], parallel: Parallel) -> torch.Tensor:
    """Return row numbers and digests that this rank reports, padded to a fixed size."""
    numbers = [int(row) for batch in batches for row in batch.rows]
    size, real, digests = len(numbers), [], b""
    if parallel.reports_rows:
        real = [number for number in numbers if number != PADDING]
        digests = b"".join(digest for batch in batches for digest in batch.digests)
    assert len(digests) == len(real) * DIGEST_BYTES
    padded = bytearray(digests.ljust(size * DIGEST_BYTES, b"\0"))
    return torch.cat(
        [
            torch.tensor(real + [PADDING] * (size - len(real))),
            torch.frombuffer(padded, dtype=torch.int64),
        ]
    )


def _exchange(message: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather all ranks' messages, [ranks, words]. Collective."""
    messages = message.new_empty(dist.get_world_size(group), len(message))
    dist.all_gather_into_tensor(messages, message.unsqueeze(0), group=group)
    return messages


def _wrong_rows(rows: torch.Tensor, ranks: torch.Tensor, expected: range) -> RunError:
    """Return an error that names missing, repeated and foreign rows, and the ranks that took them.

    `rows` are sorted; `ranks` has the rank that took each row.
    """
    expected_rows = torch.arange(expected.start, expected.stop)
    distinct, counts = rows.unique(return_counts=True)
    foreign = ~torch.isin(distinct, expected_rows)

    def add_ranks(chosen: torch.Tensor) -> list[str]:
        return [f"{row} (rank {_listed(ranks[rows == row].tolist())})" for row in chosen.tolist()]

    problems = {
        "missing": expected_rows[~torch.isin(expected_rows, rows)].tolist(),
        "taken more than once": add_ranks(distinct[(counts > 1) & ~foreign]),
        "not of this step": add_ranks(distinct[foreign]),
    }
    return RunError(
        f"the ranks did not take rows {expected.start} to {expected.stop - 1}, each once",
        where="; ".join(
            f"{kind}: row {_listed(rows_)}" for kind, rows_ in problems.items() if rows_
        ),
        hint="check that all machines have the same headrace and read the same folder of the run; "
        "the same command resumes from the last checkpoint",
    )


def _listed(values: Sequence[object]) -> str:
    return ", ".join([*map(str, values[:MAX_SHOWN]), *["…"] * (len(values) > MAX_SHOWN)])


class Transfer:
    """An asynchronous copy of vectors to host memory, in fp64. `wait` waits only for launches that
    precede the copy: meanwhile the device may run later launches."""

    def __init__(self, vectors: Sequence[torch.Tensor]) -> None:
        self.lengths = [len(vector) for vector in vectors]
        joined = torch.cat([vector.double() for vector in vectors])
        self.numbers = joined.to("cpu", non_blocking=True)  # page-locked, if from a GPU
        self.arrived = torch.cuda.Event() if joined.device.type == "cuda" else None
        if self.arrived is not None:
            self.arrived.record()

    def wait(self) -> list[torch.Tensor]:
        """Return the vectors in host memory."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return list(self.numbers.split(self.lengths))
