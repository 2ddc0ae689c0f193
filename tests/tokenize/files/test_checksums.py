"""A verified file gives the bytes that were hashed, or an error."""

from __future__ import annotations

import io
import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.console.errors import InputError
from headrace.tokenize.files.checksums import (
    MAX_BLOCKS,
    MIN_BLOCK_BYTES,
    BlockChecksums,
    VerifiedFile,
    choose_block_bytes,
    compute_checksum,
    hash_content,
)

Reads = Sequence[tuple[int, int]]
READS = st.lists(st.tuples(st.integers(0, 120), st.integers(0, 120)), max_size=8)


def checksums_of(data: bytes, block_bytes: int) -> BlockChecksums:
    blocks = (data[at : at + block_bytes] for at in range(0, len(data), block_bytes))
    checksums = hash_content(blocks, block_bytes).checksums
    assert checksums is not None
    return checksums


def open_verified(data: bytes, checksums: BlockChecksums) -> io.BufferedReader:
    return io.BufferedReader(VerifiedFile(io.BytesIO(data), checksums, "a.txt"), 1)


@given(st.binary(max_size=100), st.integers(1, 40), READS)
def test_a_verified_file_reads_like_the_file(data: bytes, block_bytes: int, reads: Reads) -> None:
    plain = io.BytesIO(data)
    stream = open_verified(data, checksums_of(data, block_bytes))
    for at, size in reads:
        plain.seek(at), stream.seek(at)
        assert stream.read(size) == plain.read(size)
        assert stream.tell() == max(at, plain.tell())
    assert stream.seek(-min(3, len(data)), io.SEEK_END) == max(0, len(data) - 3)
    assert stream.read() == data[-3:]


@given(st.binary(min_size=1, max_size=100), st.integers(1, 40), READS, st.data())
def test_changed_bytes_are_never_read(
    data: bytes, block_bytes: int, reads: Reads, draw: st.DataObject
) -> None:
    """A read of the changed block is an error; other blocks can be read."""
    changed = draw.draw(st.integers(0, len(data) - 1))
    damaged = bytearray(data)
    damaged[changed] ^= draw.draw(st.integers(1, 255))
    checksums = checksums_of(data, block_bytes)
    for at, size in [*reads, (0, len(data))]:
        stream = open_verified(bytes(damaged), checksums)
        stream.seek(at)
        end = min(at + size, len(data))
        blocks = range(at // block_bytes, -(-end // block_bytes)) if at < end else range(0)
        if changed // block_bytes in blocks:
            with pytest.raises(InputError, match=r"1 input changed while .*a\.txt"):
                stream.read(size)
        else:
            assert stream.read(size) == data[at:end]


@given(st.binary(min_size=1, max_size=100), st.integers(1, 40), st.integers(1, 100))
def test_a_file_that_lost_its_end_is_an_error(data: bytes, block_bytes: int, lost: int) -> None:
    checksums = checksums_of(data, block_bytes)
    with pytest.raises(InputError, match="changed"):
        open_verified(data[:-lost], checksums).read()
    assert open_verified(data + b"more", checksums).read() == data, "it ends where it ended"


def test_a_block_has_the_crc_of_its_bytes() -> None:
    checksums = checksums_of(b"abcdefgh", 4)
    expected = [zlib.crc32(b"abcd"), zlib.crc32(b"efgh")]
    assert checksums.checksums == b"".join(crc.to_bytes(4, "little") for crc in expected)
    assert checksums_of(b"", 4) == BlockChecksums(0, 4, b"")


def test_changes_in_large_blocks_change_the_checksum() -> None:
    block = np.random.default_rng(0).integers(0, 256, 5 * 2048 + 100, np.uint8)
    expected = compute_checksum(block.tobytes())
    assert compute_checksum(memoryview(b"x" + block.tobytes())[1:]) == expected, "at any address"
    changed_blocks = {"shifted": np.roll(block, 1)}
    for place in (0, 7, 2047, 2048, 9000, 10239, 10240, len(block) - 1):
        changed_blocks[f"byte {place}"] = block.copy()
        changed_blocks[f"byte {place}"][place] += 1
    for name, width, first, second in (
        ("rows swapped", 2048, 0, 2048),
        ("words of a row swapped", 8, 2048, 2056),
        ("words of a column swapped", 8, 8, 4104),
        ("bytes of a word swapped", 1, 3, 4),
    ):
        places = np.arange(len(block))
        places[first : first + width] += second - first
        places[second : second + width] -= second - first
        changed_blocks[name] = block[places]
    for name, changed in changed_blocks.items():
        assert compute_checksum(changed.tobytes()) != expected, name


@pytest.mark.parametrize("size", [0, 1, 1 << 34, (1 << 34) + 1, 1 << 40, 10**15])
def test_a_file_has_a_bounded_number_of_checksums(size: int) -> None:
    block_bytes = choose_block_bytes(size)
    assert -(-size // block_bytes) <= MAX_BLOCKS
    assert block_bytes == MIN_BLOCK_BYTES or -(-size // (block_bytes // 2)) > MAX_BLOCKS
