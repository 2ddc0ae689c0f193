"""Rows whose pieces are found together equal the documents laid side by side."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.data.small_data import random_documents, write_dataset

from headrace.dataplane.arrays import Int64
from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.loader import gather
from headrace.dataplane.loader.gather import SplitRows, concatenate_ranges, find_pieces
from headrace.dataplane.loader.stored_rows import StoredRows
from headrace.dataplane.order.stream import RowLocations

CHUNK_BYTES = 512
DOCUMENTS = random_documents(9, 130)
FLAT = np.concatenate(DOCUMENTS)
STARTS = np.cumsum([0, *map(len, DOCUMENTS)])


@pytest.fixture(scope="module", params=["arrow", "mds"])
def corpus(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """130 documents in two generations and several shards."""
    url = str(tmp_path_factory.mktemp(request.param) / "corpus")
    write_dataset(url, DOCUMENTS[:90], format=request.param, shard_documents=25)
    write_dataset(url, DOCUMENTS[90:], format=request.param, shard_documents=25)
    return Dataset(url)


LENGTH = 700
rows = st.lists(
    st.lists(st.integers(0, len(FLAT) - LENGTH - 2), min_size=1, max_size=3), min_size=1
)
"""The first tokens of the spans of each row, which are equally long."""


@given(rows, st.data())
@settings(max_examples=150)
def test_rows_equal_those_of_the_documents(
    corpus: Dataset, rows: list[list[int]], data: st.DataObject
) -> None:
    """Read in blocks of rows that were located together."""
    pieces, expected, documents, joints = {}, [], [], []
    for number, firsts in enumerate(rows):
        sizes = [len(part) for part in np.array_split(np.arange(LENGTH), len(firsts))]
        pairs = [(first, first + size) for first, size in zip(firsts, sizes, strict=True)]
        if len(pairs) > 1:
            pieces[number] = np.array(pairs, np.int64)
        place = number * (LENGTH + 1)
        for start, end in [*pairs[:-1], (pairs[-1][0], pairs[-1][1] + 1)]:
            if place > number * (LENGTH + 1):
                joints.append(place)
            expected.append(FLAT[start:end])
            documents += [place + begin - start for begin in STARTS if start < begin < end]
            place += end - start
    firsts = np.array([row[0] for row in rows], np.int64)
    zeros = np.zeros(len(rows), np.int64)
    located = RowLocations(zeros, LENGTH, zeros.astype(np.int32), zeros, firsts, pieces)
    result = find_pieces(SplitRows.split(located, lambda source: corpus))
    assert result.document_starts.tolist() == documents and result.joints.tolist() == joints
    whole = np.concatenate(expected).reshape(len(rows), LENGTH + 1)
    first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(rows))] * 2)))
    for low, high in ((0, len(rows)), (first, last)):
        assert np.array_equal(widened(result.read(low, high)[0]), whole[low:high])


def widened(stored: StoredRows) -> Int64:
    out = np.full((len(stored.memory), stored.length), -1)
    stored.widen(out)
    return out


@given(st.lists(st.integers(0, len(FLAT) - LENGTH - 1), min_size=1, max_size=7), st.data())
@settings(max_examples=50)
def test_chunks_are_those_of_the_bytes(
    corpus: Dataset, firsts: list[int], data: st.DataObject
) -> None:
    """Compared with the memory that the tokens are read from."""
    zeros = np.zeros(len(firsts), np.int64)
    located = RowLocations(zeros, LENGTH, zeros.astype(np.int32), zeros, np.array(firsts, np.int64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "CHUNK_BYTES", CHUNK_BYTES)
        pieces = find_pieces(SplitRows.split(located, lambda source: corpus))
        first, last = sorted(data.draw(st.tuples(*[st.integers(0, len(firsts))] * 2)))
        result = {(pieces.shards[at][1], chunk) for at, chunk in pieces.chunks(first, last)}
    expected = set()
    for start in firsts[first:last]:
        for shard, _, low, high in corpus._shard_ranges(start, start + LENGTH + 1):
            base = shard.file.read(0, 1).__array_interface__["data"][0]
            for view in shard.tokens(low, high):
                byte = view.__array_interface__["data"][0] - base
                last_byte = byte + view.nbytes - 1
                chunks = range(byte // CHUNK_BYTES, last_byte // CHUNK_BYTES + 1)
                expected |= {(shard.number, chunk) for chunk in chunks}
    assert result == expected


@given(st.lists(st.tuples(st.integers(-9, 9), st.integers(0, 5)), max_size=6))
def test_ranges_are_laid_side_by_side(pairs: list[tuple[int, int]]) -> None:
    firsts, counts = np.array(pairs, np.int64).reshape(-1, 2).T
    expected = [number for first, count in pairs for number in range(first, first + count)]
    assert concatenate_ranges(firsts, counts).tolist() == expected


@given(st.lists(st.booleans(), max_size=9), st.integers(1, 40), st.integers(0, 99))
def test_rows_of_two_types_are_widened_and_hashed_as_they_are_stored(
    wide: list[bool], length: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    dtypes = [np.dtype("<u2"), np.dtype("<u4")]
    rows = [
        rng.integers(0, 1 << (31 if item else 16), length).astype(dtypes[item]) for item in wide
    ]
    bytes = np.full((len(rows), 4 * length), 255, np.uint8)
    for number, row in enumerate(rows):
        bytes[number, : row.nbytes] = row.view(np.uint8)
    stored = StoredRows(bytes, length, dtypes, np.array(wide, np.int64))
    assert widened(stored).tolist() == [row.tolist() for row in rows]
    assert stored.digests() == [blake2b(row.tobytes(), digest_size=16).digest() for row in rows]
