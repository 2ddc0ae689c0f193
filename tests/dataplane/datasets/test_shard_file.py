"""Local shards that change while they are read. (Shards damaged before: test_loader.py.)"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.data.small_data import plan_of

from headrace.console.errors import IntegrityError, UserError
from headrace.dataplane.loader.loader import Batch, Loader
from headrace.dataplane.order.plan import Plan

Reading = tuple[Iterator[list[Batch]], list[Path]]


@pytest.fixture
def reading(dataset: Callable[..., str]) -> Reading:
    """A loader in the middle of many epochs of a small source, and the source's shards, of which
    every chunk has been read."""
    url = dataset("web", count=300)
    steps = iter(Loader(plan_over(url), micro_batch=8, group_bytes=1))
    for _ in range(150):
        next(steps)
    return steps, sorted(Path(url, "shards").iterdir())


def plan_over(url: str) -> Plan:
    return plan_of(
        {
            "sources": {"one": {"data": url, "max_epochs": 9}},
            "phases": {
                "all": {"tokens": 200_000, "seq_len": 64, "batch": 512, "weights": {"one": 1}}
            },
        }
    )


@pytest.mark.parametrize("damage", ["flip", "set back", "truncate", "append", "remove", "replace"])
def test_a_shard_changed_during_reading_is_named(reading: Reading, damage: str) -> None:
    steps, shards = reading
    for shard in shards:
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        if damage in ("flip", "set back"):
            before = shard.stat()
            with shard.open("rb+") as file:
                file.write(data)
            if damage == "set back":
                os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
        elif damage == "truncate":
            os.truncate(shard, 100)
        elif damage == "append":
            with shard.open("ab") as file:
                file.write(b"x")
        elif damage == "remove":
            shard.unlink()
        else:
            shard.unlink()
            shard.write_bytes(data)
    with pytest.raises(UserError) as caught:
        next(steps)
    assert any(shard.name in str(caught.value) for shard in shards)
    assert caught.value.hint
    assert damage == "remove" or isinstance(caught.value, IntegrityError)


def test_a_shard_replaced_by_an_equal_one_is_accepted(reading: Reading) -> None:
    steps, shards = reading
    undisturbed = Loader(plan_over(str(shards[0].parents[1])), micro_batch=8, start_step=150)
    expected = [batch.digests for (batch,) in undisturbed]
    for shard in shards:
        data = shard.read_bytes()
        shard.unlink()
        shard.write_bytes(data)
    assert [batch.digests for (batch,) in steps] == expected
