from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data.small_data import plan_of, random_documents, threads_of_loaders, write_dataset

from headrace.console.errors import ConfigError, IntegrityError, StorageError
from headrace.dataplane.datasets import cache_folder as folders
from headrace.dataplane.datasets.cache import Cache
from headrace.dataplane.datasets.cache_folder import MARKER
from headrace.dataplane.datasets.chunks import ChunkHasher, Run
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.datasets.manifest import Shard
from headrace.dataplane.loader import prefetch as prefetching
from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.storage import storage


def cached_bytes(cache: Cache) -> int:
    return sum(path.stat().st_size for path in cache.folder.root.glob("*/[0-9]*"))


def recorded(cache: Cache) -> int:
    return int(struct.unpack("<q", (cache.folder.root / MARKER).read_bytes())[0])


def plan_over(url: str, tokens: int = 60_000) -> Plan:
    return plan_of(
        {
            "chunk": 1024,
            "window": 4,
            "sources": {"one": {"data": url}},
            "phases": {
                "all": {"tokens": tokens, "seq_len": 64, "batch": 1024, "weights": {"one": 1}}
            },
        }
    )


def digests(loader: Loader) -> list[bytes]:
    """Return the digests of all rows, when no thread of the loader changes the cache any more."""
    result = [digest for step in loader for batch in step for digest in batch.digests]
    assert not threads_of_loaders(60)
    return result


def test_remote_rows_equal_local_ones(remote: str, tmp_path: Path) -> None:
    local = str(tmp_path / "local")
    write_dataset(local, random_documents(5, 400))
    cache = Cache(tmp_path / "cache")
    assert digests(Loader(plan_over(remote), micro_batch=4, cache=cache)) == digests(
        Loader(plan_over(local), micro_batch=4)
    )
    assert recorded(cache) == cached_bytes(cache)


def test_every_byte_is_fetched_once(remote: str, tmp_path: Path) -> None:
    plan = plan_over(remote)
    cache = Cache(tmp_path / "cache")
    digests(Loader(plan, micro_batch=4, cache=cache))
    total = sum(shard.size for shard in Dataset(remote).shards)
    assert cache.fetched_bytes == cached_bytes(cache) <= total
    again = Cache(tmp_path / "cache")
    digests(Loader(plan, micro_batch=4, cache=again))
    assert again.fetched_bytes == 0


def test_adjacent_chunks_take_one_request(remote: str, tmp_path: Path) -> None:
    shard = max(Dataset(remote).shards, key=lambda shard: shard.size)
    cache = Cache(tmp_path / "cache")
    third = chunk(cache, remote, shard, 2)
    assert cache.requests == 1
    cache.fetch(remote, shard, 0, 5)
    assert cache.requests == 3, "one for the chunks before the cached one, one for those after it"
    names = {path.name for path in (cache.folder.root / shard.hash).iterdir()}
    assert names == {"0-2", "2", "3-5"}, "and a file for each request"
    whole = storage.read(storage.join(remote, shard.name))
    assert bytes(np.concatenate(cache.chunks(remote, shard, 0, 5))) == whole[: 5 * 4096]
    assert third == whole[2 * 4096 : 3 * 4096]
    assert cache.requests == 3


def test_a_folder_deleted_during_use_is_created_again(remote: str, tmp_path: Path) -> None:
    expected = digests(Loader(plan_over(remote), micro_batch=4, cache=Cache(tmp_path / "whole")))
    cache = Cache(tmp_path / "cache", max_bytes=12 * 4096)
    seen = []
    loader = Loader(plan_over(remote), micro_batch=4, cache=cache, group_bytes=1)  # step by step
    for number, step in enumerate(loader):
        seen += [digest for batch in step for digest in batch.digests]
        if number % 10 == 3:
            # All at once: the loader's threads go on writing there.
            cache.folder.root.rename(tmp_path / f"deleted-{number}")
    assert seen == expected and not threads_of_loaders(60)
    assert recorded(cache) == cached_bytes(cache)


def test_a_folder_deleted_while_a_writer_waits_for_its_lock_is_created_again(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer locks the new folder: the lock of the deleted one excludes nobody."""
    shard = Dataset(remote).shards[0]
    cache = Cache(tmp_path / "cache")
    chunk(cache, remote, shard, 0)
    deleted = tmp_path / "deleted"

    def flock(file: object, how: int, flock: Any = fcntl.flock) -> None:
        flock(file, how)
        if not deleted.exists():
            cache.folder.root.rename(deleted)

    monkeypatch.setattr(fcntl, "flock", flock)
    chunk(cache, remote, shard, 1)
    assert recorded(cache) == cached_bytes(cache) > 0
    assert kept(cache, shard) == {1}


def test_a_full_disk_is_an_error(
    remote: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Dataset(remote).shards[0]
    cache = Cache(tmp_path / "cache")
    chunk(cache, remote, shard, 0)

    def full(path: Path, data: bytes) -> None:
        with path.open("wb") as file:
            file.write(bytes(data)[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch, pytest.raises(StorageError, match="is full") as caught:
        patch.setattr(Path, "write_bytes", full)
        chunk(cache, remote, shard, 1)
    assert caught.value.hint and caught.value.where == str(cache.folder.root)
    chunk(cache, remote, shard, 1)
    assert recorded(cache) == cached_bytes(cache)
    assert not list(cache.folder.root.glob("*/.*"))


def test_the_bound_is_never_exceeded(remote: str, tmp_path: Path, small_chunks: int) -> None:
    bound = 12 * small_chunks
    cache = Cache(tmp_path / "cache", max_bytes=bound)
    expected = digests(Loader(plan_over(remote), micro_batch=4, cache=Cache(tmp_path / "large")))
    seen = []
    for step in Loader(plan_over(remote), micro_batch=4, cache=cache):
        seen += [digest for batch in step for digest in batch.digests]
        with cache.folder.locked():  # or a prefetch changes it while it is counted
            assert cached_bytes(cache) <= bound
    assert seen == expected and not threads_of_loaders(60)
    assert recorded(cache) == cached_bytes(cache)


def chunk(cache: Cache, url: str, shard: Shard, number: int) -> bytes:
    return bytes(cache.chunks(url, shard, number, number + 1)[0])


def kept(cache: Cache, shard: Shard) -> set[int]:
    return {n for run in cache.folder.runs(shard, 0, 1 << 20) for n in range(*run)}


def test_a_damaged_object_is_named_and_not_kept(tmp_path: Path, small_chunks: int) -> None:
    url = f"memory://damaged-{os.urandom(4).hex()}/web"
    write_dataset(url, random_documents(5, 300))
    shard = Dataset(url).shards[0]
    where = storage.join(url, shard.name)
    data = bytearray(storage.read(where))
    data[small_chunks + 100] ^= 1
    storage.write(where, bytes(data))
    cache = Cache(tmp_path / "cache")
    with pytest.raises(IntegrityError, match=shard.name):
        digests(Loader(plan_over(url, 50_000), micro_batch=4, cache=cache))
    assert 1 not in kept(cache, shard)


@pytest.mark.parametrize("size", [2 * 4096, 2 * 4096 + 1, 5])
def test_an_object_that_has_grown_is_named(small_chunks: int, tmp_path: Path, size: int) -> None:
    """Also if the size is a multiple of the chunk size."""
    url, data = f"memory://grown-{os.urandom(4).hex()}", os.urandom(size)
    hasher = ChunkHasher()
    hasher.update(data)
    chunks, digest = hasher.finish()
    shard = Shard(name="x.arrow", size=size, documents=1, tokens=1, hash=digest, chunks=chunks)
    last = -(-size // small_chunks)
    storage.write(f"{url}/x.arrow", data)
    good = Cache(tmp_path / "good")
    assert b"".join(map(bytes, good.chunks(url, shard, 0, last))) == data
    assert good.fetched_bytes == size
    storage.write(f"{url}/x.arrow", data + b"x")
    with pytest.raises(IntegrityError, match=r"x\.arrow has more bytes than"):
        Cache(tmp_path / "grown").chunks(url, shard, 0, last)


def test_local_shards_are_not_cached(remote: str, tmp_path: Path) -> None:
    """In a mixture that also has remote sources."""
    local = str(tmp_path / "local")
    write_dataset(local, random_documents(6, 400))
    plan = plan_of(
        {
            "chunk": 1024,
            "sources": {"here": {"data": local}, "there": {"data": remote}},
            "phases": {
                "all": {
                    "tokens": 60_000,
                    "seq_len": 64,
                    "batch": 1024,
                    "weights": {"here": 0.5, "there": 0.5},
                }
            },
        }
    )
    cache = Cache(tmp_path / "cache")
    digests(Loader(plan, micro_batch=4, cache=cache))
    kept = {path.name for path in cache.folder.root.iterdir() if path.is_dir()}
    assert kept <= {shard.hash for shard in Dataset(remote).shards}


def test_a_folder_with_other_files_is_refused(remote: str, tmp_path: Path) -> None:
    mine = tmp_path / "thesis.tex"
    mine.write_text("years of work")
    with pytest.raises(ConfigError, match="not a headrace cache"):
        digests(Loader(plan_over(remote), micro_batch=4, cache=Cache(tmp_path, max_bytes=1)))
    assert mine.exists()


def test_only_its_own_files_are_evicted(remote: str, tmp_path: Path, small_chunks: int) -> None:
    cache = Cache(tmp_path / "cache", max_bytes=2 * small_chunks)
    digests(Loader(plan_over(remote, 9000), micro_batch=4, cache=cache))
    foreign_file = cache.folder.root / "notes" / "1"
    foreign_file.parent.mkdir()
    foreign_file.write_bytes(b"x" * 100_000)
    digests(Loader(plan_over(remote), micro_batch=4, cache=cache))
    assert foreign_file.exists()


FETCH_ALL = """
import sys
from pathlib import Path
from headrace.dataplane.datasets.cache import Cache
from headrace.dataplane.datasets.dataset import Dataset

url, folder = sys.argv[1:]
cache = Cache(Path(folder))
for shard in Dataset(url, cache=cache).shards:
    cache.chunks(url, shard, 0, 1)
print(cache.fetched_bytes)
"""

CROSSED_FETCHES = """
import sys, threading, time
from pathlib import Path
from headrace.dataplane.datasets.cache import Cache
from headrace.dataplane.datasets.manifest import Shard

folder, number = Path(sys.argv[1]), int(sys.argv[2])
cache = Cache(folder / "cache")
shard = Shard(name="x", size=0, documents=0, tokens=0, hash="0" * 64, chunks=b"")
with cache._fetch_lock(shard, number, number + 1):
    (folder / f"ready-{number}").touch()
    while not (folder / f"ready-{1 - number}").exists():
        time.sleep(0.01)

    def wait():
        with cache._fetch_lock(shard, 1 - number, 2 - number):
            pass

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.5)
thread.join()
print("done")
"""

HOLD_THE_LOCK = """
import sys, time
from pathlib import Path
from headrace.dataplane.datasets.cache import Cache

folder = Path(sys.argv[1])
cache = Cache(folder)
cache.folder.lock_file
with cache.folder.locked():
    (next(folder.glob("*/")) / ".0.0123abcd").write_bytes(b"half")
    print("held", flush=True)
    time.sleep(1000)
"""


def start(code: str, *arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_several_processes_fetch_a_chunk_once(tmp_path: Path) -> None:
    home = tmp_path / "home"
    write_dataset(str(home), random_documents(5, 200))
    folder = tmp_path / "cache"
    # fsspec's own scheme for local disks, which is handled like a remote store.
    jobs = [start(FETCH_ALL, f"local://{home}", folder) for _ in range(3)]
    fetched = [int(job.communicate(timeout=300)[0]) for job in jobs]
    cache = Cache(folder)
    assert sum(fetched) == cached_bytes(cache) == recorded(cache) > 0


def test_a_killed_process_blocks_nobody(remote: str, tmp_path: Path) -> None:
    """Killed with the lock held and the size marked unknown: the next process counts again."""
    cache = Cache(tmp_path / "cache")
    shard = Dataset(remote).shards[0]
    chunk(cache, remote, shard, 0)
    job = start(HOLD_THE_LOCK, cache.folder.root)
    assert job.stdout and job.stdout.readline() == "held\n"
    job.kill()
    job.communicate()
    assert recorded(cache) == folders.UNKNOWN
    again = Cache(tmp_path / "cache")
    chunk(again, remote, shard, 1)
    assert recorded(again) == cached_bytes(again)
    assert not list(again.folder.root.glob("*/.*"))


def test_a_chunk_damaged_on_the_disk_is_fetched_again(remote: str, tmp_path: Path) -> None:
    expected = digests(Loader(plan_over(remote), micro_batch=4, cache=Cache(tmp_path / "cache")))
    cache = Cache(tmp_path / "cache")
    files = list(cache.folder.root.glob("*/[0-9]*"))
    assert any("-" in path.name for path in files)
    for path in files:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        (tmp_path / "damaged").write_bytes(data)
        (tmp_path / "damaged").replace(path)
    assert digests(Loader(plan_over(remote), micro_batch=4, cache=cache)) == expected
    assert recorded(cache) == cached_bytes(cache) >= cache.fetched_bytes > 0


def test_reading_holds_no_file_open(remote: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    loader = iter(Loader(plan_over(remote), micro_batch=4, cache=cache))
    next(loader)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in loader:
        pass
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + prefetching.NUM_FETCHERS


def test_threads_of_two_processes_do_not_deadlock(tmp_path: Path) -> None:
    """Each process holds a byte that a thread of the other waits for."""
    jobs = [start(CROSSED_FETCHES, tmp_path, str(number)) for number in range(2)]
    assert [job.communicate(timeout=300)[0] for job in jobs] == ["done\n", "done\n"]


def test_a_chunk_cut_short_by_a_power_cut_is_fetched_again(remote: str, tmp_path: Path) -> None:
    cache = Cache(tmp_path / "cache")
    shard = Dataset(remote).shards[0]
    whole = chunk(cache, remote, shard, 0)
    cache.folder.path(shard, Run(0, 1)).write_bytes(whole[:10])
    assert chunk(cache, remote, shard, 0) == whole
