from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.data.small_data import random_documents, write_dataset

from headrace.console.errors import IntegrityError
from headrace.dataplane.datasets import manifest as manifests
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.datasets.manifest import Shard
from headrace.dataplane.datasets.shard_tables import BLOCK_SHARDS, ShardTables
from headrace.dataplane.storage import verified
from headrace.dataplane.storage.host_files import folder


@pytest.fixture
def listed(tmp_path: Path) -> tuple[Dataset, list[Shard]]:
    """A dataset of two generations whose tables list many shards, and those shards. Some are
    empty; their files do not exist."""
    url = str(tmp_path / "many")
    write_dataset(url, random_documents(0, 30))
    manifest = manifests.load(url)
    (model,) = manifests.load_table(url, manifest.generations[0])
    rng = np.random.default_rng(0)
    shards = [
        replace(model, name=f"shards/{number}", tokens=tokens, documents=tokens // 3)
        for number, tokens in enumerate(rng.integers(0, 9, 3 * BLOCK_SHARDS + 5).tolist())
    ]
    manifest = replace(manifest, generations=())
    for part in (shards[: BLOCK_SHARDS + 7], shards[BLOCK_SHARDS + 7 :]):
        manifest = manifest.append(manifests.write_generation(url, part))
    manifests.save(url, manifest)
    return Dataset(url), shards


def test_shards_and_sums_are_those_of_the_tables(listed: tuple[Dataset, list[Shard]]) -> None:
    dataset, shards = listed
    tables = ShardTables(dataset.url, dataset.generations)
    assert list(tables) == shards and len(tables) == len(shards)
    assert tables[len(shards) - 1] == shards[-1]
    with pytest.raises(IndexError):
        tables[len(shards)]
    for name in ("tokens", "documents"):
        counts = [getattr(shard, name) for shard in shards]
        assert tables.sums(name).tolist() == np.cumsum([0, *counts]).tolist()


def test_every_token_is_in_the_shard_that_a_walk_over_all_shards_gives(
    listed: tuple[Dataset, list[Shard]],
) -> None:
    dataset, shards = listed
    token = 0
    for number, shard in enumerate(shards):
        for _ in range(shard.tokens):
            assert dataset._shard_at(token)[0] == number
            token += 1
    assert token == dataset.shard_tokens[-1]


def test_only_the_hashes_of_open_shards_are_in_memory(dataset: Callable[..., str]) -> None:
    """The tables are views of mapped files: reading a shard makes a copy of its row alone."""
    import pyarrow as pa

    opened = Dataset(dataset("web", shard_documents=5))
    before = pa.total_allocated_bytes()
    out = np.empty(50, np.int64)
    opened.fill(0, out)
    assert len(opened.shards) > 10
    assert len(opened._open) < len(opened.shards) / 2
    assert pa.total_allocated_bytes() == before


def test_a_remote_table_is_fetched_once_and_repaired(tmp_path: Path) -> None:
    url = "memory://tables/web"
    documents = random_documents(0, 30)
    write_dataset(url, documents, shard_documents=5)
    generation = manifests.load(url).generations[0]
    whole = list(ShardTables(url, [generation]))
    (copy,) = folder().glob("*.arrow")
    data = copy.read_bytes()
    copy.write_bytes(data[:-9] + b"x" + data[-8:])
    assert list(ShardTables(url, [generation])) == whole
    assert copy.read_bytes() == data


def test_a_damaged_local_table_is_an_error(dataset: Callable[..., str]) -> None:
    url = dataset("web")
    table = Path(url, manifests.load(url).generations[0].table)
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    with pytest.raises(IntegrityError, match="does not match the hash"):
        len(Dataset(url).shards)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_a_table_that_changes_under_a_reader_is_named_and_may_come_back(
    tmp_path: Path, place: str
) -> None:
    """Each byte of the table is flipped in place, in turn. Of a store, the host's copy changes: it
    is fetched again."""
    url = "memory://changing/web" if place == "memory" else str(tmp_path / "web")
    write_dataset(url, random_documents(0, 12), shard_documents=5)
    dataset = Dataset(url)
    whole = list(dataset.shards)
    table = Path(url, dataset.generations[0].table)
    if place == "memory":
        (table,) = folder().glob("*.arrow")
    data = table.read_bytes()
    for at in range(0, len(data), 29):
        with table.open("r+b") as file:
            file.seek(at)
            file.write(bytes([data[at] ^ 1 << at % 8]))
        if place == "memory":
            assert list(dataset.shards) == whole
            continue
        with pytest.raises(IntegrityError, match="does not match the hash") as caught:
            dataset.shards[1]
        assert str(table) in caught.value.message and caught.value.hint
        table.write_bytes(data)
        assert dataset.shards[1] == whole[1]


def test_a_table_that_changes_while_it_is_read_is_named(
    dataset: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Dataset(dataset("web"))
    opened.shards.sums("tokens")
    monkeypatch.setattr(verified, "read_state", lambda path: opened.shards._tables[0]._state)
    table = Path(opened.url, opened.generations[0].table)
    data = table.read_bytes()
    with table.open("r+b") as file:
        file.write(bytes(len(data)))
    with pytest.raises(IntegrityError, match="changed while it was read") as caught:
        opened.shards[0]
    assert str(table) in caught.value.message and caught.value.hint


def test_open_shards_and_tables_hold_no_descriptor(dataset: Callable[..., str]) -> None:
    """Thousands of files are mapped at once, and the usual limit is 1,024 descriptors."""
    opened = Dataset(dataset("web", shard_documents=5))
    opened.fill(0, np.empty(opened.tokens, np.int64))
    assert len(opened._open) > 10
    held = []
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            held.append(str(link.readlink()))
    assert held and not [file for file in held if file.startswith(opened.url)]
    assert opened.url in Path("/proc/self/maps").read_text()
