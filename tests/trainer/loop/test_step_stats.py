from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.ranks.ranks import Ranks

from headrace.console.errors import RunError
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.loop.step_stats import StepStats, combine, gather, step_loss


@dataclass
class Batch:
    rows: list[int]
    sources: list[int]
    weights: torch.Tensor
    digests: list[bytes]


def digest(row: int) -> bytes:
    return bytes([row]) * 16


BATCHES: Any = [
    Batch([7, 5], [1, 0], torch.tensor([[2.0, 0.0], [1.0, 3.0]]), [digest(7), digest(5)]),
    Batch([6, -1], [1, 0], torch.tensor([[4.0, 0.0], [0.0, 0.0]]), [digest(6)]),
]
LOSSES = [torch.tensor([5.0, 2.0]), torch.tensor([4.0, 0.0])]


def test_digests_are_in_global_order_without_padding(parallel: Parallel) -> None:
    stats = gather(BATCHES, LOSSES, 2, range(5, 8), parallel, data_wait=0.5, stop=True)
    assert stats.digests == digest(5) + digest(6) + digest(7)
    assert stats.rows == [1, 2], "padding is no source's row"
    assert (stats.losses, stats.weights) == ([2, 9], [4, 6])
    assert stats.loss == pytest.approx(11 / 10)
    assert step_loss(BATCHES, LOSSES, 2, parallel) == stats.loss
    assert (stats.stop, stats.save_failed, stats.data_wait) == (True, False, 0.5)


def message(
    rows: list[int],
    losses: list[float],
    size: int = 3,
    received: Sequence[int] = (),
    own: float = math.nan,
    memory: float = 0.0,
    penalty: float = 0.0,
) -> torch.Tensor:
    """Return what a rank sends of rows that are 1 or 2 bytes wide, written by hand."""
    load = [float(n) for n in (max(received, default=0), sum(received), len(received))]
    numbers = [*losses, *[1.0] * len(losses), *[float(len(rows))] * len(losses), 0.0, 0.0, 0.0]
    numbers += [*load, penalty, memory, own]
    padded = [*rows, *[-1] * (size - len(rows))]
    words = [half for row in padded for half in (row, row + 1)]
    floats = torch.tensor(numbers, dtype=torch.float64).view(torch.int64)
    return torch.cat([floats, torch.tensor(padded), torch.tensor(words)])


def combined(*rows: list[int], expected: range) -> StepStats:
    return combine(torch.stack([message(each, [1.0]) for each in rows]), 1, expected)


def test_the_losses_of_ranks_are_added_in_the_order_of_the_ranks() -> None:
    """A pairwise sum, as torch.sum's, has other bits."""
    generator = random.Random(3)
    losses = [[generator.random() * 10**place for place in range(3)] for _ in range(300)]
    stacked = torch.stack([message([number], each) for number, each in enumerate(losses)])
    totals = [0.0, 0.0, 0.0]
    for each in losses:
        totals = [total + loss for total, loss in zip(totals, each, strict=True)]
    assert combine(stacked, 3, range(300)).losses == totals
    pairwise = torch.tensor(losses, dtype=torch.float64).sum(dim=0).tolist()
    assert pairwise != totals, "the numbers can tell the two apart"


def test_the_busiest_experts_are_compared_with_the_mean() -> None:
    """Rank 0 has three layers with experts and rank 1 one, as two stages of a pipeline may."""
    messages = [message([0], [1.0], received=[6, 10, 2]), message([1], [1.0], received=[6])]
    assert combine(torch.stack(messages), 1, range(2)).expert_load == 10 / 6
    assert combined([0], [1], expected=range(2)).expert_load is None


def test_the_z_loss_is_no_part_of_the_loss() -> None:
    messages = [message([0], [3.0], penalty=0.5), message([1], [1.0], penalty=0.25)]
    stats = combine(torch.stack(messages), 1, range(2))
    assert (stats.loss, stats.z_loss) == (2.0, 0.375)


def test_the_memory_of_each_rank_is_known_to_all() -> None:
    messages = [message([0], [1.0], memory=80e9), message([1], [1.0], memory=60e9)]
    assert combine(torch.stack(messages), 1, range(2)).memory == (80 * 10**9, 60 * 10**9)


def test_the_own_time_of_each_rank_is_known_to_all() -> None:
    messages = [message([0], [1.0], own=0.5), message([1], [1.0], own=0.25)]
    assert combine(torch.stack(messages), 1, range(2)).own_seconds == (0.5, 0.25)
    assert combined([0], [1], expected=range(2)).own_seconds == ()


def test_rows_of_any_ranks_in_any_order_are_the_rows_of_the_step() -> None:
    stats = combined([6, 4], [], [3, 7, 5], expected=range(3, 8))
    words = [half for row in range(3, 8) for half in (row, row + 1)]
    assert stats.digests == b"".join(word.to_bytes(8, "little") for word in words)


@pytest.mark.parametrize(
    ("rows", "where"),
    [
        (([3, 4], [5, 6], []), "missing: row 7"),
        (
            ([3, 4], [4, 5, 6], [7, 4]),
            "taken more than once: row 4 (rank 0, 1, 2)",
        ),
        (
            ([3, 4, 5], [3, 4, 5], [9]),
            "missing: row 6, 7; taken more than once: row 3 (rank 0, 1), 4 (rank 0, 1), "
            "5 (rank 0, 1); not of this step: row 9 (rank 2)",
        ),
    ],
)
def test_wrong_rows_are_named_with_their_ranks(rows: Any, where: str) -> None:
    with pytest.raises(RunError, match="did not take rows 3 to 7, each once") as caught:
        combined(*rows, expected=range(3, 8))
    assert caught.value.where == where


def test_many_wrong_rows_are_listed_in_part() -> None:
    with pytest.raises(RunError) as caught:
        combined([0], [0], expected=range(20))
    assert caught.value.where == (
        "missing: row 1, 2, 3, 4, 5, 6, 7, 8, …; taken more than once: row 0 (rank 0, 1)"
    )


def test_ranks_that_read_the_same_rows_fail_at_the_step(two: Ranks) -> None:
    """Two ranks train on a plan; in the control run each reads its own rows."""
    right, wrong = (two.run("take_rows", as_rank=numbers) for numbers in ([0, 1], [0, 0]))
    assert right == ["finished", "finished"]
    assert (
        wrong
        == [
            "the ranks did not take rows 0 to 3, each once; "
            "missing: row 2, 3; taken more than once: row 0 (rank 0, 1), 1 (rank 0, 1)"
        ]
        * 2
    )
