"""Checksums of the blocks of an input file: what is tokenized is what was hashed.

A file is hashed in blocks, and a CRC-32 per block is kept. Later readers read whole blocks, and
compare their checksums before any byte is used. So a change in a file is noticed where it happened,
whatever the file's times say, without another read of the whole file.

Reading a few bytes costs a block, so blocks are small.
"""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ...console.errors import InputError

MIN_BLOCK_BYTES = 256 << 10
"""Bytes of a block; very large files have larger blocks."""
MAX_BLOCKS = 1 << 16
"""Blocks of a file: every task that reads a part receives all checksums."""
CRC_BYTES = 4


@dataclass(frozen=True)
class BlockChecksums:
    """A file's CRC-32 by block."""

    size: int
    """Bytes of the file."""
    block_bytes: int
    """Bytes of a block; the last one may be shorter."""
    crcs: bytes
    """Four bytes per block."""

    def matches(self, number: int, block: bytes) -> bool:
        """Return True if `block` is the file's block `number`."""
        start = CRC_BYTES * number
        length = min(self.block_bytes, self.size - number * self.block_bytes)
        return len(block) == length and _crc(block) == self.crcs[start : start + CRC_BYTES]


@dataclass(frozen=True)
class ContentHash:
    """Identifies a file's content."""

    fingerprint: str
    checksums: BlockChecksums | None = None
    """None: the content was not read, because its store names it by a tag."""


def choose_block_bytes(size: int) -> int:
    """Choose the block size for a file of `size` bytes: a power of two."""
    return max(MIN_BLOCK_BYTES, 1 << (-(-size // MAX_BLOCKS) - 1).bit_length())


def hash_content(blocks: Iterable[bytes], block_bytes: int) -> ContentHash:
    """Hash a file's content, given in blocks of `block_bytes`."""
    digest, crcs, size = hashlib.sha256(), bytearray(), 0
    for block in blocks:
        digest.update(block)
        crcs += _crc(block)
        size += len(block)
    return ContentHash(name_content(digest), BlockChecksums(size, block_bytes, bytes(crcs)))


def name_content(digest: Any) -> str:
    """Return the part of a sha256 that names a file's content."""
    return str(digest.hexdigest()[:32])


def changed_inputs_error(names: Sequence[str]) -> InputError:
    """Return the error for inputs with other content than was hashed."""
    return InputError(
        f"{len(names)} inputs changed while they were read: {', '.join(names[:10])}",
        hint="build from files that no program is writing",
    )


class VerifiedFile(io.RawIOBase):
    """A file that compares blocks with their checksums before use. It ends where it ended when it
    was hashed."""

    def __init__(self, stream: BinaryIO, checksums: BlockChecksums, name: str) -> None:
        self.name = name
        self._stream = stream
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
        if number != self._number:
            self._number, self._block = number, self._read(number)
        data = memoryview(self._block)[start : start + len(buffer)]
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()

    def _read(self, number: int) -> bytes:
        """Read a block; raise InputError if it does not match its checksum."""
        start = number * self._checksums.block_bytes
        if self._stream.tell() != start:  # a web server may have no ranges, and need not seek
            self._stream.seek(start)
        block = self._stream.read(min(self._checksums.block_bytes, self._checksums.size - start))
        if not self._checksums.matches(number, block):
            raise changed_inputs_error([self.name])
        return block


def _crc(block: bytes) -> bytes:
    return zlib.crc32(block).to_bytes(CRC_BYTES, "little")
