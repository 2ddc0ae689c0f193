from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.dataplane.arrays import Bytes
from headrace.dataplane.datasets import cache_folder, chunks
from headrace.dataplane.datasets.cache import Cache
from headrace.dataplane.datasets.chunks import Run
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.datasets.manifest import Shard
from headrace.dataplane.storage import checked_files, storage


def cached_bytes(cache: Cache) -> int:
    return sum(path.stat().st_size for path in cache.folder.root.glob("*/[0-9]*"))


def deleted_maps(cache: Cache) -> int:
    """Count the deleted chunks that this process has mapped: the disk still holds them."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum(str(cache.folder.root) in line and "(deleted)" in line for line in lines)


def test_an_evicted_chunk_keeps_its_bytes_and_is_unmapped(
    remote: str, tmp_path: Path, small_chunks: int
) -> None:
    cache = Cache(tmp_path / "cache")
    dataset = Dataset(remote, cache=cache)
    shard = max(dataset.shards, key=lambda shard: shard.size)
    file = dataset.file(shard)
    whole = storage.read(storage.join(remote, shard.name))
    file.backing.refresh()
    view = file.read(0, shard.size)
    # As another process: it evicts.
    second_cache = Cache(tmp_path / "cache", max_bytes=small_chunks)
    second_cache.chunks(remote, shard, 0, 1)
    assert cached_bytes(second_cache) <= small_chunks
    assert bytes(view) == whole
    assert deleted_maps(cache) > 0
    file.backing.refresh()
    assert bytes(view) == whole, "a view was changed"
    del view
    assert deleted_maps(cache) == 0
    assert bytes(file.read(0, shard.size)) == whole


def test_reads_between_evictions_equal_the_shard(
    remote: str, tmp_path: Path, small_chunks: int
) -> None:
    """By threads that evict one another's chunks, with few maps, and a bound of few chunks."""
    cache = Cache(tmp_path / "cache", max_bytes=6 * small_chunks)
    cache.max_mapped = 5
    dataset = Dataset(remote, cache=cache)
    wholes = [storage.read(storage.join(remote, shard.name)) for shard in dataset.shards]
    files = [dataset.file(shard) for shard in dataset.shards]

    def read(seed: int) -> int:
        rng, seen = np.random.default_rng(seed), 0
        for _ in range(60):
            number = int(rng.integers(len(files)))
            start, end = sorted(rng.integers(0, len(wholes[number]) + 1, 2).tolist())
            files[number].backing.refresh()
            assert bytes(files[number].read(start, end)) == wholes[number][start:end]
            seen += 1
        return seen

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(read, range(3))) == [60] * 3
    with cache.folder.locked():
        assert cached_bytes(cache) <= 6 * small_chunks


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the chunks whose files are hashed."""
    numbers: list[int] = []

    def matches(shard: Shard, number: int, data: Bytes) -> bool:
        numbers.append(number)
        return chunks.matches_digest(shard, number, data)

    monkeypatch.setattr(cache_folder, "matches_digest", matches)
    return numbers


def change(path: Path, data: bytes) -> None:
    """Write to a file until its ctime shows it: the kernel's clock ticks every few milliseconds."""
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:
        path.write_bytes(data)


def test_the_file_of_a_chunk_is_hashed_again_only_if_it_may_have_changed(
    remote: str, tmp_path: Path, hashed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = Cache(tmp_path / "cache")
    shard = max(Dataset(remote).shards, key=lambda shard: shard.size)
    cache.fetch(remote, shard, 0, 4)

    def hashed_by(reader: Cache) -> list[int]:
        file, hashed[:] = Dataset(remote, cache=reader).file(shard), []
        file.read(0, 4 * 4096)
        file.read(0, 4 * 4096)
        return list(hashed)

    assert hashed_by(cache) == []
    assert hashed_by(Cache(tmp_path / "cache")) == [], "another process knows that it was verified"
    path = cache.folder.path(shard, Run(0, 4))
    change(path, path.read_bytes())
    assert hashed_by(cache) == [0, 1, 2, 3]
    assert hashed_by(Cache(tmp_path / "cache")) == []
    with monkeypatch.context() as patch:
        patch.setattr(checked_files, "_start", lambda: b"another start of the machine")
        assert hashed_by(Cache(tmp_path / "cache")) == [0, 1, 2, 3]
    (tmp_path / "cache" / cache_folder.CHECKED).write_bytes(b"")
    assert hashed_by(Cache(tmp_path / "cache")) == [0, 1, 2, 3]


def test_a_chunk_damaged_between_its_write_and_its_first_read_is_fetched_again(
    remote: str, tmp_path: Path
) -> None:
    cache = Cache(tmp_path / "cache")
    dataset = Dataset(remote, cache=cache)
    shard = max(dataset.shards, key=lambda shard: shard.size)
    whole = storage.read(storage.join(remote, shard.name))
    cache.fetch(remote, shard, 0, 4)
    before = cache.requests
    path = cache.folder.path(shard, Run(0, 4))
    change(path, bytes(reversed(path.read_bytes())))
    assert bytes(dataset.file(shard).read(0, 4 * 4096)) == whole[: 4 * 4096]
    assert cache.requests == before + 1
