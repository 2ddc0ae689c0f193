from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.data.small_data import random_documents, write_dataset

from headrace.console.errors import IntegrityError, StorageError
from headrace.dataplane.datasets import manifest as manifests
from headrace.dataplane.datasets.chunks import CHUNK_BYTES, ChunkHasher


def test_round_trip_and_totals(dataset: Callable[..., str]) -> None:
    url = dataset("web", count=120)
    manifest = manifests.load(url)
    table = manifests.load_table(url, manifest.generations[0])
    assert manifest.documents == 120 == sum(shard.documents for shard in table)
    assert manifest.tokens == sum(shard.tokens for shard in table)
    manifests.save(url, manifest)
    assert manifests.load(url) == manifest


def test_earlier_generations_keep_their_hash(tmp_path: Path) -> None:
    url = str(tmp_path / "d")
    first = write_dataset(url, random_documents(1, 30))
    second = write_dataset(url, random_documents(2, 30))
    assert second.generations[0] == first.generations[0]
    assert second.hash != first.hash
    assert manifests.load(url).generations[0].hash == first.hash


def test_a_mirror_is_the_same_dataset(tmp_path: Path) -> None:
    documents = random_documents(1, 30)
    original = write_dataset(str(tmp_path / "one"), documents)
    mirror = write_dataset(str(tmp_path / "other"), documents)
    assert original.hash == mirror.hash


def test_no_dataset(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no dataset at") as caught:
        manifests.load(str(tmp_path))
    assert "tokenize build" in str(caught.value)
    assert caught.value.where is None
    with pytest.raises(StorageError, match=f"below {Path.cwd()}, where this command was run"):
        manifests.load("data/web")


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["generations"][0].update(tokens=1),
        lambda data: data["tokenizer"].update(vocab_size=9),
        lambda data: data.update(dtype="uint32"),
        lambda data: data.pop("settings"),
    ],
)
def test_any_changed_value_is_detected(dataset: Callable[..., str], change: Callable) -> None:  # type: ignore[type-arg]
    url = dataset("web")
    file = Path(url, "manifest.json")
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    with pytest.raises(IntegrityError):
        manifests.load(url)


def test_an_incomplete_or_newer_manifest_is_refused(dataset: Callable[..., str]) -> None:
    url = dataset("web")
    file = Path(url, "manifest.json")
    whole = file.read_text()
    file.write_text(whole[: len(whole) // 2])
    with pytest.raises(IntegrityError, match="not a whole manifest"):
        manifests.load(url)
    file.write_text(json.dumps({**json.loads(whole), "version": 9}))
    with pytest.raises(StorageError, match="version 9"):
        manifests.load(url)


def test_a_changed_table_is_detected(dataset: Callable[..., str]) -> None:
    url = dataset("web")
    generation = manifests.load(url).generations[0]
    Path(url, generation.table).write_bytes(b"x")
    with pytest.raises(IntegrityError, match="does not match the hash"):
        manifests.load_table(url, generation)


@given(st.lists(st.integers(0, 3 * CHUNK_BYTES // 2), max_size=6))
def test_chunk_hashes_do_not_depend_on_the_sizes_of_writes(sizes: list[int]) -> None:
    data = bytes(range(256)) * (sum(sizes) // 256 + 1)
    data = data[: sum(sizes)]
    parts, whole = ChunkHasher(), ChunkHasher()
    at = 0
    for size in sizes:
        parts.update(data[at : at + size])
        at += size
    whole.update(data)
    assert parts.finish() == whole.finish()
    assert len(whole.finish()[0]) == 32 * -(-len(data) // CHUNK_BYTES)


def test_settings_do_not_change_the_hash(dataset: Callable[..., str]) -> None:
    """Settings of a build that do not decide tokens are not in the hash."""
    manifest = manifests.load(dataset("web"))
    assert replace(manifest, settings={"note": 1}).hash == manifest.hash
