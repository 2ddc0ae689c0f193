"""Statistics of a step, gathered from all ranks in one message of a fixed size.

    Σ w·ℓ, Σ w, rows by source │ flags, metrics that ranks combine │ row numbers │ digests
    fp64, 3 × sources          │ fp64, by the table of metrics     │ int64       │ 16 bytes each

The messages travel through host memory, after the last backward pass. Every rank adds up the same
numbers in the same order, so all ranks reach the same decision. The gathered row numbers prove that
the ranks took the rows of the step, each once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ...console.errors import RunError
from ...dataplane.runlog.ledger import DIGEST_BYTES
from ...models.config.options.names import Divisor
from ..engines.objective import divisor_terms
from ..layout.groups import Parallel
from .batches import PADDING, MicroBatch
from .metrics import Combination, Largest, add_in_order, combinations, mean

FLAGS: Mapping[str, Combination] = {"stop": Largest(), "save_failed": Largest()}
"""Facts that are true for the step if they are true for any rank."""
DIGEST_WORDS = DIGEST_BYTES // 8
SHOWN = 8
"""Most rows, and ranks of a row, that an error lists."""


@dataclass(frozen=True)
class StepStats:
    """Statistics of one step over all ranks."""

    losses: list[float]
    """Σ w·ℓ by source, without the z-loss."""
    weights: list[float]
    """Divisors of the losses by source: Σ w, or as `loss_divisor` says."""
    rows: list[int]
    """Rows by source."""
    digests: bytes
    """Digests of the step's rows, side by side in global order."""
    stop: bool = False
    """True if any rank was asked to stop."""
    save_failed: bool = False
    """True if the background save of any rank failed."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    """Metrics that all ranks combine, by name, without those that no rank has measured."""

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
    """Gather the statistics of this rank's micro-batches from all ranks. Collective.

    `losses` are this rank's contribution to Σ w·ℓ, by row for each micro-batch. `measured` are its
    flags and metrics, by name. Raise on all ranks unless they report the `expected` rows, each
    once.
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
    """Return the message of this rank, int64 [words]. Weights and row numbers that several ranks
    hold are reported by one of them."""
    table = {**FLAGS, **combinations()}
    assert measured.keys() <= table.keys(), f"{measured.keys() - table.keys()} have no combination"
    numbers: list[float] = []
    for name, ranks in table.items():
        absent = [ranks.absent] * ranks.size
        numbers += ranks.encode(measured[name]) if name in measured else absent
    sums = _sums(batches, losses, sources, parallel, divisor).flatten()
    floats = torch.cat([sums, torch.tensor(numbers, dtype=torch.float64)])
    return torch.cat([floats.view(torch.int64), _rows(batches, parallel)])


def total_weight(batches: Sequence[MicroBatch], parallel: Parallel, divisor: Divisor) -> float:
    """Return the divisor of the loss of the micro-batches of all ranks. Collective."""
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
    """Return the loss that `gather` will give, to the bit. Collective over the ranks that compute
    the loss: the sums of the others are zeros.

    The sums by source are gathered, not reduced: a reduction adds in another order.
    """
    sums = _sums(batches, losses, sources, parallel, divisor)[:2].flatten()
    totals = add_in_order(_exchange(sums, parallel.pipe.last_stage)).view(2, sources)
    loss, weight = totals.tolist()
    return mean(sum(loss), sum(weight))


def combine(messages: torch.Tensor, sources: int, expected: range) -> StepStats:
    """Combine the messages of all ranks, int64 [ranks, words]."""
    table = {**FLAGS, **combinations()}
    sizes = [3 * sources, *(ranks.size for ranks in table.values())]
    size = (messages.shape[1] - sum(sizes)) // (1 + DIGEST_WORDS)
    floats, rows, digests = messages.split([sum(sizes), size, DIGEST_WORDS * size], dim=1)
    sums, *numbers = floats.view(torch.float64).split(sizes, dim=1)
    losses, weights, counts = add_in_order(sums).view(3, sources).tolist()
    metrics = {
        name: value
        for (name, ranks), columns in zip(table.items(), numbers, strict=True)
        if (value := ranks.combine(columns, sum(weights))) is not None
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
        **{name: bool(metrics.pop(name, False)) for name in FLAGS},
        metrics=metrics,
    )


def _sums(
    batches: Sequence[MicroBatch],
    losses: Sequence[torch.Tensor],
    sources: int,
    parallel: Parallel,
    divisor: Divisor,
) -> torch.Tensor:
    """Return this rank's Σ w·ℓ, divisors and rows by source, [3, sources]."""
    source = torch.tensor([int(each) for batch in batches for each in batch.sources])
    sums_by_row = [divisor_terms(batch.weights, divisor).sum(dim=1) for batch in batches]
    weights = torch.cat(sums_by_row) * parallel.counts_tokens
    drawn = torch.tensor([row != PADDING for batch in batches for row in batch.rows])
    sums = torch.zeros(3, sources, dtype=torch.float64)
    # Losses on a device take one transfer for all micro-batches.
    by_row = (torch.cat(list(losses)), weights, drawn * parallel.reports_rows)
    for total, numbers in zip(sums, by_row, strict=True):
        total.index_add_(0, source, numbers.double().cpu())
    return sums


def _rows(batches: Sequence[MicroBatch], parallel: Parallel) -> torch.Tensor:
    """Return the row numbers that this rank reports and their digests; the rest is padding."""
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
    """Return the messages of all ranks, [ranks, words]. Collective."""
    messages = message.new_empty(dist.get_world_size(group), len(message))
    dist.all_gather_into_tensor(messages, message.unsqueeze(0), group=group)
    return messages


def _wrong_rows(rows: torch.Tensor, ranks: torch.Tensor, expected: range) -> RunError:
    """Return the error that names missing, repeated and foreign rows, and the ranks that took them.

    `rows` are sorted; `ranks` holds the rank that took each of them.
    """
    wanted = torch.arange(expected.start, expected.stop)
    distinct, counts = rows.unique(return_counts=True)
    foreign = ~torch.isin(distinct, wanted)

    def with_ranks(chosen: torch.Tensor) -> list[str]:
        return [f"{row} (rank {_listed(ranks[rows == row].tolist())})" for row in chosen.tolist()]

    kinds = {
        "missing": wanted[~torch.isin(wanted, rows)].tolist(),
        "taken more than once": with_ranks(distinct[(counts > 1) & ~foreign]),
        "not of this step": with_ranks(distinct[foreign]),
    }
    return RunError(
        f"the ranks did not take rows {expected.start} to {expected.stop - 1}, each once",
        where="; ".join(f"{kind}: row {_listed(each)}" for kind, each in kinds.items() if each),
        hint="check that all machines have the same headrace and read the same folder of the run; "
        "the same command resumes from the last checkpoint",
    )


def _listed(values: Sequence[object]) -> str:
    return ", ".join([*map(str, values[:SHOWN]), *["…"] * (len(values) > SHOWN)])


class Transfer:
    """A copy of vectors to host memory, as fp64. `wait` waits for the launches before the copy
    alone: the device may run those after it meanwhile."""

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
