"""Ranks of another launcher meet at the store of rank 0, or name those that do not come."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from ports import free_ports

from headrace.console.errors import RunError
from headrace.trainer.cluster.ranks import meet


def met(came: Sequence[int], world: int, seconds: float) -> list[str]:
    """Return what each rank that came gets."""
    port = free_ports()

    def come(rank: int) -> str:
        try:
            store = meet("127.0.0.1", port, rank, world, timedelta(seconds=seconds))
        except RunError as error:
            return str(error)
        stores.append(store)
        return "met"

    stores: list[object] = []  # rank 0 holds the server of all
    with ThreadPoolExecutor(len(came)) as pool:
        return list(pool.map(come, came))


def test_all_ranks_meet() -> None:
    assert met([2, 0, 1], 3, seconds=20) == ["met"] * 3


def test_ranks_that_do_not_come_are_named_on_all_others() -> None:
    for answer in met([0, 2], 5, seconds=0.5):
        said = "ranks did not come within 0 seconds (watch.join_seconds): rank 1, 3, 4 of 5"
        assert said in answer


def test_many_missing_ranks_are_counted() -> None:
    (answer,) = met([0], 2048, seconds=0.5)
    assert ": rank 1, 2, 3" in answer and "16, and 2031 more of 2048" in answer


def test_without_rank_0_the_address_is_named() -> None:
    (answer,) = met([1], 2, seconds=1)
    assert "rank 1 did not reach rank 0 at 127.0.0.1:" in answer and "MASTER_ADDR" in answer
