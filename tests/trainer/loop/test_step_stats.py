from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from support.ranks.ranks import Ranks

from headrace.console.errors import RunError
from headrace.trainer.layout.groups import Parallel
from headrace.trainer.loop.step_stats import StepStats, combine, encode, gather, step_loss


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
    stats = gather(BATCHES, LOSSES, 2, range(5, 8), parallel)
    assert stats.digests == digest(5) + digest(6) + digest(7)
    assert stats.rows == [1, 2], "padding is no source's row"
    assert (stats.losses, stats.weights) == ([2, 9], [4, 6])
    assert stats.loss == pytest.approx(11 / 10)
    assert step_loss(BATCHES, LOSSES, 2, parallel) == stats.loss
    assert (stats.stop, stats.save_failed, stats.metrics) == (False, False, {})


@pytest.fixture
def send(parallel: Parallel) -> Callable[..., torch.Tensor]:
    """Return the message of a rank that takes rows of the sources in turn, at most three, and
    padding. Each row has a loss of the weight 1."""

    def message(rows: list[int], losses: Sequence[float] = (), **measured: Any) -> torch.Tensor:
        padding = 3 - len(rows)
        digests = [words(row) for row in rows]
        weights = torch.tensor([[1.0]] * len(rows) + [[0.0]] * padding)
        batch: Any = Batch([*rows, *[-1] * padding], [0, 1, 2], weights, digests)
        summed = torch.tensor([*losses, *[0.0] * (3 - len(losses))], dtype=torch.float64)
        return encode([batch], [summed], 3, parallel, "weights", measured)

    return message


def words(row: int) -> bytes:
    return row.to_bytes(8, "little") + (row + 1).to_bytes(8, "little")


def combined(messages: Iterable[torch.Tensor], expected: range) -> StepStats:
    return combine(torch.stack([*messages]), 3, expected)


def test_the_losses_of_ranks_are_added_in_the_order_of_the_ranks(send: Any) -> None:
    """A pairwise sum, as torch.sum's, has other bits."""
    generator = random.Random(3)
    losses = [[generator.random() * 10**place for place in range(3)] for _ in range(300)]
    messages = [send([3 * n, 3 * n + 1, 3 * n + 2], numbers) for n, numbers in enumerate(losses)]
    totals = [0.0, 0.0, 0.0]
    for numbers in losses:
        totals = [total + loss for total, loss in zip(totals, numbers, strict=True)]
    assert combined(messages, range(900)).losses == totals
    pairwise = torch.tensor(losses, dtype=torch.float64).sum(dim=0).tolist()
    assert pairwise != totals, "the numbers can tell the two apart"


def test_the_busiest_experts_are_compared_with_the_mean(send: Any) -> None:
    """Rank 0 has three layers with experts and rank 1 one, as two stages of a pipeline may."""
    messages = [send([0], expert_load=[6, 10, 2]), send([1], expert_load=[6])]
    assert combined(messages, range(2)).metrics["expert_load"] == 10 / 6
    none = [send([0], expert_load=[]), send([1], expert_load=[])]
    assert not combined(none, range(2)).metrics


def test_the_z_loss_is_no_part_of_the_loss(send: Any) -> None:
    stats = combined([send([0], [3.0], z_loss=0.5), send([1], [1.0], z_loss=0.25)], range(2))
    assert (stats.loss, stats.metrics["z_loss"]) == (2.0, 0.375)


def test_the_flags_of_a_rank_and_the_longest_wait_are_those_of_the_step(send: Any) -> None:
    stats = combined([send([0], data_wait=0.5), send([1], data_wait=0.2, stop=True)], range(2))
    assert (stats.stop, stats.save_failed, stats.metrics) == (True, False, {"data_wait": 0.5})


def test_the_numbers_of_each_rank_are_known_to_all(send: Any) -> None:
    messages = [send([0], own_seconds=0.5, memory=80), send([1], own_seconds=0.25, memory=60)]
    metrics = combined(messages, range(2)).metrics
    assert (metrics["own_seconds"], metrics["memory"]) == ((0.5, 0.25), (80, 60))
    messages[1] = send([1], memory=60)
    assert "own_seconds" not in combined(messages, range(2)).metrics, "rank 1 has none"


def test_a_rank_measures_nothing_that_the_table_lacks(send: Any) -> None:
    with pytest.raises(AssertionError, match="dummy"):
        send([0], dummy=1.0)


def test_rows_of_any_ranks_in_any_order_are_the_rows_of_the_step(send: Any) -> None:
    stats = combined(map(send, ([6, 4], [], [3, 7, 5])), range(3, 8))
    assert stats.digests == b"".join(map(words, range(3, 8)))


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
def test_wrong_rows_are_named_with_their_ranks(send: Any, rows: Any, where: str) -> None:
    with pytest.raises(RunError, match="did not take rows 3 to 7, each once") as caught:
        combined(map(send, rows), range(3, 8))
    assert caught.value.where == where


def test_many_wrong_rows_are_listed_in_part(send: Any) -> None:
    with pytest.raises(RunError) as caught:
        combined([send([0]), send([0])], range(20))
    assert caught.value.where == (
        "missing: row 1, 2, 3, 4, 5, 6, 7, 8, …; taken more than once: row 0 (rank 0, 1)"
    )


def test_ranks_that_read_the_same_rows_fail_at_the_step(two_ranks: Ranks) -> None:
    """Two ranks train on a plan; in the control run each reads its own rows."""
    right, wrong = (two_ranks.run("take_rows", as_rank=numbers) for numbers in ([0, 1], [0, 0]))
    assert right == ["finished", "finished"]
    assert (
        wrong
        == [
            "the ranks did not take rows 0 to 3, each once; "
            "missing: row 2, 3; taken more than once: row 0 (rank 0, 1), 1 (rank 0, 1)"
        ]
        * 2
    )
