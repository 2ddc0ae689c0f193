from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from support.data.small_data import plan_of, random_documents, write_dataset

from headrace.console.errors import PlanError, StorageError
from headrace.dataplane.datasets import chunks
from headrace.dataplane.datasets.cache import Cache
from headrace.dataplane.datasets.manifest import Shard
from headrace.dataplane.loader.prefetch import FetchQueue, Prefetcher, PrefetchLimits
from headrace.dataplane.loader.rank_rows import RankReader, RankRows
from headrace.dataplane.loader.rows import PendingRows, RowReader
from headrace.dataplane.order.plan import Plan
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.views.select import SelectConfig, select

ROWS = 16
"""Rows of a step."""


@pytest.fixture
def plan() -> Plan:
    """Shards of about 100 KB, each one chunk."""
    url = f"memory://ahead-{os.urandom(4).hex()}/web"
    write_dataset(url, random_documents(5, 900, longest=2000))
    return plan_of(
        {
            "chunk": 4096,
            "window": 4,
            "sources": {"one": {"data": url}},
            "phases": {
                "all": {"tokens": 600_000, "seq_len": 64, "batch": 1024, "weights": {"one": 1}}
            },
        }
    )


def one_shard() -> Plan:
    """A shard of several chunks, which are read one after the other."""
    url = f"memory://rest-{os.urandom(4).hex()}/web"
    write_dataset(url, random_documents(5, 900, longest=2000), shard_documents=900)
    phase = {"tokens": 600_000, "seq_len": 64, "batch": 64 * ROWS, "weights": {"one": 1}}
    order = {"chunk": 1 << 17, "window": 1}
    return plan_of({**order, "sources": {"one": {"data": url}}, "phases": {"all": phase}})


def blocks(reader: RowReader) -> Iterator[PendingRows]:
    """Find the rows of each step."""
    steps = map(reader.plan.step, range(reader.plan.end_step))
    rows = (np.arange(step.first_row, step.first_row + step.rows) for step in steps)
    return reader.find_blocks(rows)


def reached(ahead: Prefetcher) -> list[int]:
    with ahead.changed:
        return [step for step, *_ in ahead.unfinished]


def cached_chunks(cache: Cache) -> set[tuple[str, int]]:
    """Return the chunks on the disk."""
    with cache.folder.locked():
        files = list(cache.folder._files())
    return {(hash, number) for hash, run in files for number in range(*run)}


def eventually(condition: object, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_fetches_the_chunks_that_are_read_next(plan: Plan, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    reader = RowReader(plan, cache=cache)
    ahead = Prefetcher(blocks(reader), cache)
    try:
        eventually(lambda: len(ahead.unfinished) == plan.end_step)  # everything fits
        eventually(lambda: set(ahead.needs) <= cached_chunks(cache))
        before = cache.requests
        taken = []
        for fetched in ahead:
            taken.append(reader.read(fetched).digests)
            ahead.finish_block()
        assert cache.requests == before, "the reader had to fetch"
        assert not ahead.needs and not ahead.unfinished_rows
        again = RowReader(plan, cache=cache)
        assert taken == [again.read(block).digests for block in blocks(again)]
    finally:
        ahead.close()


@pytest.mark.parametrize(
    "limits",
    [PrefetchLimits(max_bytes=2 * chunks.CHUNK_BYTES), PrefetchLimits(max_rows=3 * ROWS)],
)
def test_it_stays_within_its_limits(plan: Plan, tmp_path: Path, limits: PrefetchLimits) -> None:
    cache = Cache(tmp_path)
    reader = RowReader(plan, cache=cache)
    ahead = Prefetcher(blocks(reader), cache, limits)
    try:
        eventually(lambda: len(ahead.needs) >= 2)
        time.sleep(0.3)
        assert len(reached(ahead)) < plan.end_step // 2
        for step, result in enumerate(ahead):  # the walk follows the reader
            assert result.located.rows[0] == plan.step(step).first_row
            assert step in reached(ahead) and ahead.unfinished_rows <= limits.max_rows
            ahead.finish_block()
        assert step == plan.end_step - 1
    finally:
        ahead.close()


def test_the_walk_rests_while_the_cache_has_all_chunks(tmp_path: Path) -> None:
    """When files are removed from the cache, it goes on, and the reader gets the same rows."""
    limits = PrefetchLimits(max_rows=32 * ROWS, near_rows=4 * ROWS, burst=1)
    plan = one_shard()
    alone = RowReader(plan, cache=Cache(tmp_path))
    expected = [alone.read(block).digests for block in blocks(alone)]
    cache = Cache(tmp_path)
    reader = RowReader(plan, cache=cache)
    ahead, digests, walked = Prefetcher(blocks(reader), cache, limits), [], 0
    try:
        for step in range(plan.end_step):
            digests.append(reader.read(next(ahead)).digests)
            ahead.finish_block()
            if step == 1:
                eventually(lambda: ahead.num_cached >= 1)
            if step == 40:
                assert (
                    ahead.num_cached >= 1
                    and ahead.unfinished_rows <= 4 * ROWS
                    and not cache.requests
                )
            if step == 100:
                for hash, number in cached_chunks(cache):
                    (tmp_path / hash / str(number)).unlink()
            if step > 100 and cache.requests and not ahead.num_cached:
                # It rests again if the reader has fetched the chunk before the threads did.
                eventually(
                    lambda: ahead.unfinished_rows > 4 * ROWS or ahead.num_cached or ahead.ended
                )
                walked += ahead.unfinished_rows > 4 * ROWS
    finally:
        ahead.close()
    assert digests == expected and cache.requests > 2 and walked


def test_adjacent_chunks_are_fetched_together() -> None:
    shard, second_shard = (
        Shard(name=name, size=0, documents=0, tokens=0, hash=name, chunks=b"") for name in "ab"
    )
    queue = FetchQueue()
    numbers = [40, 3, 5, 4, 41, *range(100, 150), 6]
    queue.add(("url", shard, number) for number in numbers)
    queue.add([("url", second_shard, 7)])
    taken = []
    while (run := queue.take()) is not None:
        taken.append(run[1:])
    assert taken[:3] == [(shard, 40, 42), (shard, 3, 7), (shard, 100, 116)]
    assert taken[-1] == (second_shard, 7, 8)
    assert all(last - first <= chunks.MAX_RUN_CHUNKS for _, first, last in taken)
    fetched = [n for owner, first, last in taken if owner is shard for n in range(first, last)]
    assert sorted(fetched) == sorted(numbers)


def test_close_ends_the_walk(plan: Plan, tmp_path: Path) -> None:
    reader = RowReader(plan)
    ahead = Prefetcher(blocks(reader), Cache(tmp_path))
    ahead.close()
    ahead.thread.join(300)
    assert not ahead.thread.is_alive()


def test_an_error_of_the_walk_is_raised_after_the_blocks_before_it(
    plan: Plan, tmp_path: Path
) -> None:
    reader = RowReader(plan)

    def failing() -> Iterator[PendingRows]:
        yield from islice(blocks(reader), 3)
        raise PlanError("the fourth block cannot be found")

    ahead = Prefetcher(failing(), Cache(tmp_path))
    try:
        for step in range(3):
            assert next(ahead).located.rows[0] == plan.step(step).first_row
            ahead.finish_block()
        with pytest.raises(PlanError, match="fourth"):
            next(ahead)
    finally:
        ahead.close()


@pytest.mark.parametrize("thread", ["fetching", "walking"])
def test_a_fault_of_a_thread_is_raised_at_the_next_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thread: str
) -> None:
    """The reader could fetch the chunks itself, and would never meet the fault."""

    def broken(*_: object) -> None:
        raise TypeError(f"a fault of the {thread} thread")

    name = "take" if thread == "fetching" else "add"
    monkeypatch.setattr(FetchQueue, name, broken)
    cache = Cache(tmp_path)
    ahead = Prefetcher(blocks(RowReader(one_shard(), cache=cache)), cache)
    try:
        eventually(lambda: ahead.fault, 30)
        with pytest.raises(TypeError, match=f"a fault of the {thread} thread"):
            next(ahead)
        with pytest.raises(TypeError):
            next(ahead)
    finally:
        ahead.close()


def test_a_chunk_that_cannot_be_prefetched_is_left_to_the_reader(tmp_path: Path) -> None:
    """An error of the store is no fault: the reader meets it at the row that needs the chunk."""
    attempts = []

    class Unreachable(Cache):
        def fetch(self, url: str, shard: Shard, first: int, end: int) -> int:
            attempts.append(first)
            raise StorageError("the store does not answer")

    cache = Unreachable(tmp_path)
    reader = RowReader(one_shard(), cache=cache)
    ahead = Prefetcher(blocks(reader), cache)
    try:
        eventually(lambda: attempts, 30)
        assert len(reader.read(next(ahead)).digests) == ROWS and ahead.fault is None
    finally:
        ahead.close()


@pytest.mark.parametrize("store", ["memory", "local"])
def test_a_local_view_is_prefetched_if_its_tokens_are_remote(tmp_path: Path, store: str) -> None:
    name = f"viewed-{os.urandom(4).hex()}/web"
    url, view = f"memory://{name}" if store == "memory" else str(tmp_path / name), tmp_path / "view"
    write_dataset(url, random_documents(5, 900, longest=2000))
    engine = ExecutorConfig(workers=1)
    select(SelectConfig(dataset=url, where="tokens > 500", out=str(view), engine=engine))
    phase = {"tokens": 300_000, "seq_len": 64, "batch": 1024, "weights": {"one": 1}}
    plan = plan_of({"sources": {"one": {"data": str(view)}}, "phases": {"all": phase}})
    cache = Cache(tmp_path / "cache")
    rank_rows = RankRows(plan=plan, rank=0, world=1, start_step=0, digests=True, group_bytes=50_000)
    groups = list(rank_rows.groups())
    alone, expected = RowReader(plan, cache=Cache(tmp_path / "other")), []
    for group in groups:
        result = alone.find(alone.stream.locate(group.rows()))
        expected.append(alone.read(result).digests)
    with closing(RankReader(rank_rows, cache)) as reader:
        reading = reader.groups()
        digests = [next(reading).labels.digests]
        ahead = reader._prefetcher
        assert (ahead is None) == (store == "local")
        if ahead:
            eventually(lambda: len(groups) - 1 in reached(ahead))
            eventually(lambda: set(ahead.needs) <= cached_chunks(cache))
            assert len(ahead.needs) > 3
        before = cache.requests
        digests += [group.labels.digests for group in reading]
        assert cache.requests == before, "the reader had to fetch"
    assert digests == expected


HALF_READ = """
import sys
from contextlib import closing
from pathlib import Path
from headrace.dataplane.datasets.cache import Cache
from headrace.dataplane.loader.rank_rows import RankReader, RankRows
from headrace.dataplane.order.plan import Plan

def groups():
    plan = Plan.load(sys.argv[1])
    rank_rows = RankRows(plan=plan, rank=0, world=1, start_step=0, digests=True, group_bytes=1)
    with closing(RankReader(rank_rows, Cache(sys.argv[2]))) as reader:
        yield from reader.groups()

iterator = groups()
next(iterator)
"""


def test_leaving_the_interpreter_with_a_half_read_store_is_silent(tmp_path: Path) -> None:
    write_dataset(str(tmp_path / "web"), random_documents(5, 900, longest=2000))
    phase = {"tokens": 300_000, "seq_len": 64, "batch": 1024, "weights": {"one": 1}}
    url = f"local://{tmp_path}/web"  # fsspec's own scheme, which is handled like a store
    plan = plan_of({"sources": {"one": {"data": url}}, "phases": {"all": phase}})
    plan.save(tmp_path / "plan.json")
    command = [sys.executable, "-c", HALF_READ, tmp_path / "plan.json", tmp_path / "cache"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stderr) == (0, "")
