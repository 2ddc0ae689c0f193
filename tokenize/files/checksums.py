"""Checksums of the blocks of an input file: what is tokenized is what was hashed.

A file is hashed in blocks, and a checksum per block is kept. Later readers read whole blocks, and
compare their checksums before any byte is used. So a change in a file is noticed where it happened,
whatever the file's times say, without another read of the whole file.

Reading a few bytes costs a block, so blocks are small. Line feeds are counted too, while the bytes
are at hand: a file of lines is then cut without another read (sources/delimited.py).
"""

from __future__ import annotations

import hashlib
import io
import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from ...console.errors import InputError
from ...console.progress import exact_count

MIN_BLOCK_BYTES = 256 << 10
"""Bytes of a block; very large files have larger blocks."""
MAX_BLOCKS = 1 << 16
"""Blocks of a file: every task that reads a part receives all checksums."""
NUMBER_BYTES = 4
ROW_WORDS = 256
"""Words of eight bytes in a row of a block, for its checksum."""


@dataclass(frozen=True)
class BlockChecksums:
    """A file's checksums by block."""

    size: int
    """Bytes of the file."""
    block_bytes: int
    """Bytes of a block; the last one may be shorter."""
    checksums: bytes
    """Four bytes per block (`compute_checksum`)."""
    line_feeds: bytes = field(default=b"", compare=False)
    """Four bytes per block: the number of line feeds from the byte before the block to its last
    byte but one. Empty: they were not counted."""

    def block_length(self, number: int) -> int:
        return max(0, min(self.block_bytes, self.size - number * self.block_bytes))

    def matches(self, number: int, block: bytes | memoryview) -> bool:
        """Return True if `block` is the file's block `number`."""
        start = NUMBER_BYTES * number
        return len(block) == self.block_length(number) and _encode_number(
            compute_checksum(block)
        ) == bytes(self.checksums[start : start + NUMBER_BYTES])

    def count_line_feeds(self, start: int, end: int) -> int | None:
        """Return how many line feeds the bytes [start - 1, end - 1) hold; None if that is not
        known, or not a number of whole blocks."""
        first, first_rest = divmod(start, self.block_bytes)
        stop, stop_rest = divmod(end, self.block_bytes)
        numbers = self.line_feeds[NUMBER_BYTES * first : NUMBER_BYTES * stop]
        if first_rest or stop_rest or len(numbers) < NUMBER_BYTES * (stop - first):
            return None
        return int(sum(struct.unpack(f"<{stop - first}I", numbers)))


@dataclass(frozen=True)
class ContentHash:
    """Identifies a file's content."""

    fingerprint: str
    checksums: BlockChecksums | None = None
    """None: the content was not read, because its store names it by a tag."""


def choose_block_bytes(size: int) -> int:
    """Choose the block size for a file of `size` bytes: a power of two."""
    return max(MIN_BLOCK_BYTES, 1 << (-(-size // MAX_BLOCKS) - 1).bit_length())


def compute_checksum(block: bytes | memoryview) -> int:
    """Return the CRC-32 of the sums and parities of a block's rows, and of the bytes after them.

    Numpy adds words by column and xors them by row several times as fast as zlib computes a CRC of
    the bytes. A change within a row changes a sum, and one within a column a parity. Others must
    cancel in every sum and parity to stay unseen.
    """
    import numpy as np  # help pages do without

    num_words = len(block) // (8 * ROW_WORDS) * ROW_WORDS
    rows = np.frombuffer(block, "<u8", num_words).reshape(-1, ROW_WORDS)
    crc = zlib.crc32(memoryview(block)[8 * num_words :])
    if not num_words:
        return crc
    crc = zlib.crc32(np.add.reduce(rows, axis=0).data, crc)
    return zlib.crc32(np.bitwise_xor.reduce(rows, axis=1).data, crc)


def hash_content(blocks: Iterable[bytes], block_bytes: int) -> ContentHash:
    """Hash a file's content, given in blocks of `block_bytes`."""
    from ...dataplane.arrays import count_byte  # imports numpy, which help pages do without

    digest, block_checksums, size = hashlib.sha256(), bytearray(), 0
    line_feeds, previous_feed = bytearray(), 0
    for block in blocks:
        digest.update(block)
        block_checksums += _encode_number(compute_checksum(block))
        last_feed = int(block.endswith(b"\n"))
        line_feeds += _encode_number(previous_feed + count_byte(block, b"\n") - last_feed)
        previous_feed = last_feed
        size += len(block)
    checksums = BlockChecksums(size, block_bytes, bytes(block_checksums), bytes(line_feeds))
    return ContentHash(name_content(digest), checksums)


def name_content(digest: Any) -> str:
    """Return the part of a sha256 that names a file's content."""
    return str(digest.hexdigest()[:32])


def changed_inputs_error(names: Sequence[str]) -> InputError:
    """Return the error for inputs with other content than was hashed."""
    return InputError(
        f"{exact_count(len(names), 'inputs')} changed while they were read: "
        f"{', '.join(names[:10])}",
        hint="build from files that no program is writing",
    )


class VerifiedFile(io.RawIOBase):
    """A file that compares blocks with their checksums before use. It ends where it ended when it
    was hashed."""

    def __init__(self, stream: BinaryIO, checksums: BlockChecksums, name: str) -> None:
        self.name = name
        self._stream: Any = stream  # BinaryIO has no `readinto`
        self._checksums = checksums
        self._position = 0
        self._number, self._block = -1, b""
        """The last block read."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._checksums.size}[
            whence
        ]
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any) -> int:
        if self._position >= self._checksums.size:
            return 0
        number, start = divmod(self._position, self._checksums.block_bytes)
        view = memoryview(buffer).cast("B")
        if not start and len(view) >= self._checksums.block_length(number):
            return self._read_whole_blocks(number, view)
        if number != self._number:
            self._number, self._block = number, self._read(number)
        data = memoryview(self._block)[start : start + len(view)]
        view[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()

    def _read_whole_blocks(self, number: int, view: memoryview) -> int:
        """Read the blocks from `number` on that fit into `view`, without a copy; return their
        bytes."""
        filled = 0
        while (length := self._checksums.block_length(number)) and filled + length <= len(view):
            block = view[filled : filled + length]
            self._seek_block(number)
            length = self._stream.readinto(block)
            self._check(number, block[:length])
            filled += length
            number += 1
        self._position += filled
        return filled

    def _read(self, number: int) -> bytes:
        """Read a block; raise InputError if it does not match its checksum."""
        self._seek_block(number)
        block: bytes = self._stream.read(self._checksums.block_length(number))
        self._check(number, block)
        return block

    def _seek_block(self, number: int) -> None:
        start = number * self._checksums.block_bytes
        if self._stream.tell() != start:  # a web server may have no ranges, and need not seek
            self._stream.seek(start)

    def _check(self, number: int, block: bytes | memoryview) -> None:
        if not self._checksums.matches(number, block):
            raise changed_inputs_error([self.name])


def _encode_number(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "little")
