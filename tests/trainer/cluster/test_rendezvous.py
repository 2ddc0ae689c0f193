"""Ranks of another launcher meet at the store of rank 0, or learn why they do not."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from support.ranks.ports import free_ports

from headrace.console.errors import RunError
from headrace.trainer.cluster.rendezvous import (
    Meeting,
    check_late_errors,
    meet,
    report_absence,
    wait_for_readers,
)


@pytest.fixture(autouse=True)
def _no_meeting_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("begun", "failure", "store", "readers"):
        monkeypatch.setattr(Meeting, name, getattr(Meeting, name))


class Threads:
    """Ranks of one start."""

    def __init__(self) -> None:
        self.port = free_ports()
        self.pool = ThreadPoolExecutor(8)
        self.stores: list[Any] = []
        """Stores of the ranks that met: rank 0's serves all others."""

    def come(self, rank: int, world: int, seconds: float = 60) -> Future[str]:
        """Return what a rank gets."""

        def meet_or_fail() -> str:
            try:
                self.stores.append(
                    meet("127.0.0.1", self.port, rank, world, timedelta(seconds=seconds))
                )
            except RunError as error:
                return str(error)
            return "met"

        return self.pool.submit(meet_or_fail)

    def fail(self, rank: int, world: int) -> Future[None]:
        return self.pool.submit(
            report_absence, "127.0.0.1", self.port, rank, world, "unknown key `lr`"
        )


def meet_all(ranks: Sequence[int], world: int, seconds: float = 60) -> list[str]:
    """Return what each rank that comes gets."""
    threads = Threads()
    answers = [threads.come(rank, world, seconds) for rank in ranks]
    return [answer.result() for answer in answers]


def test_all_ranks_meet() -> None:
    assert meet_all([2, 0, 1], 3) == ["met"] * 3


def test_ranks_that_do_not_come_are_named_on_all_others() -> None:
    for answer in meet_all([0, 2], 5, seconds=0.5):
        said = "ranks did not come within 0 seconds (watch.join_seconds): rank 1, 3, 4 of 5"
        assert said in answer


def test_many_missing_ranks_are_counted() -> None:
    (answer,) = meet_all([0], 2048, seconds=0.5)
    assert ": rank 1, 2, 3" in answer and "16, and 2031 more of 2048" in answer


def test_without_rank_0_the_address_is_named() -> None:
    (answer,) = meet_all([1], 2, seconds=1)
    assert "rank 1 did not reach rank 0 at 127.0.0.1:" in answer and "MASTER_ADDR" in answer


@pytest.mark.parametrize(
    ("worlds", "named"), [([2, 3], [1]), ([3, 2], [1]), ([2, 2, 3], [2]), ([2, 3, 3], [1, 2])]
)
def test_another_world_size_ends_all_ranks_at_once(worlds: list[int], named: list[int]) -> None:
    """The second case lacks rank 2 of 3, the third has a rank too many."""
    threads = Threads()
    lines = [f"rank {rank} has WORLD_SIZE={worlds[rank]}, rank 0 has {worlds[0]}" for rank in named]
    first = threads.come(0, worlds[0])
    answers = [threads.come(rank, worlds[rank]).result() for rank in named]
    rest = [rank for rank in range(1, len(worlds)) if rank not in named]
    answers += [threads.come(rank, worlds[rank]).result() for rank in rest]
    for answer in [first.result(), *answers]:
        assert any(line in answer for line in lines)


def test_another_world_size_that_comes_late_is_known_before_the_first_step() -> None:
    threads = Threads()
    answers = [threads.come(rank, 2) for rank in range(2)]
    assert [answer.result() for answer in answers] == ["met"] * 2
    check_late_errors()
    said = "rank 2 has WORLD_SIZE=3, rank 0 has 2"
    assert said in threads.come(2, 3).result()
    with pytest.raises(RunError, match=said):
        check_late_errors()


@pytest.mark.parametrize("failed", [0, 1])
def test_the_error_of_a_rank_ends_all_others_at_once(failed: int) -> None:
    """One of them comes when the others have gone already to look for the error."""
    threads = Threads()
    survivors = [rank for rank in range(3) if rank != failed]
    first = threads.come(survivors[0], 3)
    told = threads.fail(failed, 3)
    answers = [first.result(), threads.come(survivors[1], 3).result()]
    said = f"rank {failed} failed before it joined the others: unknown key `lr`"
    assert all(said in answer for answer in answers)
    told.result()


def test_ranks_that_all_fail_do_not_wait_for_each_other() -> None:
    threads = Threads()
    for told in [threads.fail(rank, 3) for rank in range(3)]:
        told.result(60)
    wait_for_readers(timedelta(days=1))
