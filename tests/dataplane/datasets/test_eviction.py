"""The files of a cache: which of them are evicted first, and what a use of them changes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.dataplane.datasets.cache import Cache
from headrace.dataplane.datasets.chunks import Run
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.datasets.manifest import Shard
from headrace.dataplane.storage import last_uses


def chunk(cache: Cache, url: str, shard: Shard, number: int) -> bytes:
    return bytes(cache.chunks(url, shard, number, number + 1)[0])


def kept(cache: Cache, shard: Shard) -> set[int]:
    return {n for run in cache.folder.runs(shard, 0, 1 << 20) for n in range(*run)}


def test_reading_the_files_of_a_cache_does_not_change_them(remote: str, tmp_path: Path) -> None:
    """A file whose ctime changes is hashed again. The order of uses is kept apart."""
    shard = max(Dataset(remote).shards, key=lambda shard: shard.size)
    cache = Cache(tmp_path / "cache")
    cache.fetch(remote, shard, 0, 4)
    path = cache.folder.path(shard, Run(0, 4))
    os.utime(path, (1, 1))
    before = path.stat().st_ctime_ns
    assert Dataset(remote, cache=cache).file(shard).read(0, 4096) is not None
    assert path.stat().st_ctime_ns == before


def test_files_used_last_are_evicted_last(
    remote: str, tmp_path: Path, small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = max(Dataset(remote).shards, key=lambda shard: shard.size)
    cache = Cache(tmp_path / "cache", max_bytes=4 * small_chunks)
    for now, number in enumerate([0, 1, 2, 3, 1, 0], start=1000):
        monkeypatch.setattr(last_uses, "clock", lambda now=now: now)
        chunk(cache, remote, shard, number)
    chunk(cache, remote, shard, 4)
    assert kept(Cache(tmp_path / "cache"), shard) == {0, 1, 3, 4}


def test_chunks_needed_soonest_are_evicted_last(
    remote: str, tmp_path: Path, small_chunks: int
) -> None:
    dataset = Dataset(remote)
    shard = max(dataset.shards, key=lambda shard: shard.size)
    cache = Cache(tmp_path / "cache", max_bytes=4 * small_chunks)
    for number in range(4):
        chunk(cache, remote, shard, number)
    expected = {(shard.hash, 0): 9, (shard.hash, 1): 3, (shard.hash, 3): 5}
    cache.folder.prefetch_needs.append(expected)
    chunk(cache, remote, shard, 4)  # nobody waits for 2
    assert kept(cache, shard) == {0, 1, 3, 4}
    expected[shard.hash, 4] = 4
    chunk(cache, remote, shard, 5)  # 0 is needed last
    assert kept(cache, shard) == {1, 3, 4, 5}


def test_a_file_with_a_chunk_that_is_needed_is_evicted_last(
    remote: str, tmp_path: Path, small_chunks: int
) -> None:
    shard = max(Dataset(remote).shards, key=lambda shard: shard.size)
    cache = Cache(tmp_path / "cache", max_bytes=4 * small_chunks)
    cache.folder.min_files = 1
    cache.fetch(remote, shard, 0, 2)
    cache.fetch(remote, shard, 2, 4)
    cache.folder.prefetch_needs.append({(shard.hash, 1): 9})
    chunk(cache, remote, shard, 4)
    assert kept(cache, shard) == {0, 1, 4}
