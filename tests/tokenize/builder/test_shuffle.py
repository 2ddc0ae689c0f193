"""Shuffling: documents and pieces move independently; the order depends on seed and corpus."""

from __future__ import annotations

from collections.abc import Callable
from functools import partialmethod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.data.corpora import read_dataset, small_blocks, texts, write_jsonl

from headrace.dataplane.shards.documents import ShardDocuments
from headrace.tokenize.builder import shuffle
from headrace.tokenize.builder.shuffle import hash_documents
from headrace.tokenize.sources.format import ReadLimits
from headrace.tokenize.sources.text import Text

Run = Callable[..., Path]


def documents(files: list[int], positions: list[int], pieces: list[int] | None) -> ShardDocuments:
    count = len(positions)
    return ShardDocuments(
        tokens=np.zeros(count, np.uint16),
        starts=np.arange(count + 1),
        files=("a", "b"),
        file=np.array(files, np.int32),
        position=np.array(positions, np.int64),
        piece=None if pieces is None else np.array(pieces, np.int64),
    )


def test_keys_depend_on_seed_file_position_and_piece() -> None:
    keys = hash_documents(documents([0, 0, 1, 0], [0, 1, 0, 0], [0, 0, 0, 1]), 7)
    assert len(set(keys.tolist())) == 4
    assert hash_documents(documents([0, 0, 1], [0, 1, 0], None), 7).tolist() == keys[:3].tolist()
    assert not set(hash_documents(documents([0], [0], [0]), 8).tolist()) & set(keys.tolist())


def test_keys_are_uniform() -> None:
    count = 20_000
    keys = hash_documents(documents([0] * count, list(range(count)), None), 1)
    buckets = np.bincount((keys >> np.uint64(60)).astype(int), minlength=16)
    assert abs(buckets - count / 16).max() < 5 * np.sqrt(count / 16)


def places(out: Path, size: int) -> list[int]:
    """Return the new order of the pieces of a document, which are numbered in its text."""
    result = [text for _, text, _ in read_dataset(out) if text.startswith("long")]
    assert len(result) == size
    return [int(text.removeprefix("long")) for text in result]


def disorder(order: list[int]) -> float:
    """Return the correlation of neighbouring numbers: 1 if their order has not changed."""
    return abs(float(np.corrcoef(order[:-1], order[1:])[0, 1]))


def test_pieces_of_one_document_are_shuffled_independently(tmp_path: Path, run_build: Run) -> None:
    """The pieces of a document are in several spills."""
    count = 800
    whole = "".join(f"long{k:05}" for k in range(count))
    file = write_jsonl(tmp_path / "a.jsonl", [*texts(300), whole, *texts(300, seed=1)])
    out = run_build(file, max_document_tokens=10, shuffle=3)
    order = places(out, count)
    assert sorted(order) == list(range(count))
    assert disorder(order) < 0.15
    everything = [origin.position for origin, _, _ in read_dataset(out)]
    near = np.mean(np.diff(everything) == 0)
    share = count / len(everything)
    assert near < share * share + 0.1, "pieces of a document stay together"


def test_a_text_read_in_pieces_is_shuffled_by_piece(
    tmp_path: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A text that is too large to be read at once is read in pieces with the same position."""
    limits = ReadLimits(block_bytes=900, document_bytes=3000)
    monkeypatch.setattr(Text, "read", partialmethod(Text.read, limits=limits))
    count = 2000
    file = tmp_path / "a.txt"
    file.write_text("".join(f"long{k:05}" for k in range(count)))
    options: dict[str, Any] = {"max_document_tokens": 10, "shard_size": 4000}
    with small_blocks(900):
        plain = run_build(file, out="plain", **options)
        out = run_build(file, shuffle=5, **options)
    assert {origin.position for origin, _, _ in read_dataset(plain)} == {0}
    ids = sorted(ids for _, _, ids in read_dataset(out))
    assert ids == sorted(ids for _, _, ids in read_dataset(plain))
    order = [int(text[4:]) for _, text, _ in read_dataset(out) if len(text) == 9]
    assert len(order) > count / 2
    assert disorder(order) < 0.15


def test_documents_are_ordered_by_key(corpus: Path, run_build: Run) -> None:
    """Oracle: sort all documents of the unshuffled build by their keys."""
    plain = read_dataset(run_build(corpus, out="plain"))
    out = run_build(corpus, shuffle=11)
    files = sorted({origin.file for origin, _, _ in plain})
    held = ShardDocuments(
        tokens=np.zeros(len(plain), np.uint16),
        starts=np.arange(len(plain) + 1),
        files=tuple(files),
        file=np.array([files.index(origin.file) for origin, _, _ in plain], np.int32),
        position=np.array([origin.position for origin, _, _ in plain], np.int64),
    )
    order = np.argsort(hash_documents(held, 11), kind="stable")
    assert [repr(item) for item in read_dataset(out)] == [repr(plain[k]) for k in order]


def test_a_gather_task_reads_one_shard_only(
    corpus: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reads only the documents of its own key range from the spills."""
    read = shuffle.read_documents
    sizes: list[int] = []

    def counting(*args: Any) -> ShardDocuments:
        result = read(*args)
        sizes.append(result.size)
        return result

    monkeypatch.setattr(shuffle, "read_documents", counting)
    out = run_build(corpus, shuffle=2)
    total = sum(len(ids) * 2 for _, _, ids in read_dataset(out))
    assert sum(sizes) == total
    assert max(sizes) < 15_000
