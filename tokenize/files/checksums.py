"""Checksums of the blocks of an input file: what is tokenized is what was hashed.

A file is read in blocks while it is hashed, and a CRC-32 of each block is kept. Whoever reads the
file later reads whole blocks, and compares each with its checksum before a byte of it is used. So a
file that changed is noticed where it changed, whatever its times say, and is not read again for it.

A read of a few bytes costs a block, so blocks are small.
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
"""Bytes of a block, but for very large files."""
MAX_BLOCKS = 1 << 16
"""Blocks of a file: each task that reads a part of it receives all its checksums."""
CRC_BYTES = 4


@dataclass(frozen=True)
class BlockChecksums:
    """CRC-32 of each block of a file."""

    size: int
    """Bytes of the file."""
    block_bytes: int
    """Bytes of a block; the last one may be shorter."""
    crcs: bytes
    """Four bytes for each block."""

    def matches(self, number: int, block: bytes) -> bool:
        """Return True if these bytes are the block with this number."""
        at = CRC_BYTES * number
        length = min(self.block_bytes, self.size - number * self.block_bytes)
        return len(block) == length and _crc(block) == self.crcs[at : at + CRC_BYTES]


@dataclass(frozen=True)
class ContentHash:
    """What tells a file's content from another."""

    fingerprint: str
    checksums: BlockChecksums | None = None
    """None: the content was not read, because its store names it by a tag."""


def choose_block_bytes(size: int) -> int:
    """Return the bytes of a block for a file of `size` bytes: a power of two."""
    return max(MIN_BLOCK_BYTES, 1 << (-(-size // MAX_BLOCKS) - 1).bit_length())


def hash_content(blocks: Iterable[bytes], block_bytes: int) -> ContentHash:
    """Return the hash of a file's content, which comes in blocks of `block_bytes`."""
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
    """Return the error for inputs whose content is not the one that was hashed."""
    return InputError(
        f"{len(names)} inputs changed while they were read: {', '.join(names[:10])}",
        hint="build from files that no program is writing",
    )


class VerifiedFile(io.RawIOBase):
    """A file whose blocks are compared with their checksums before they are used. It ends where it
    ended when it was hashed."""

    def __init__(self, stream: BinaryIO, checksums: BlockChecksums, name: str) -> None:
        self.name = name
        self._stream = stream
        self._checksums = checksums
        self._at = 0
        self._number, self._block = -1, b""
        """The block that was read last."""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._checksums.size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._checksums.size:
            return 0
        number, start = divmod(self._at, self._checksums.block_bytes)
        if number != self._number:
            self._number, self._block = number, self._read(number)
        data = memoryview(self._block)[start : start + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._stream.close()
        super().close()

    def _read(self, number: int) -> bytes:
        """Read a block, and compare it with its checksum."""
        start = number * self._checksums.block_bytes
        if self._stream.tell() != start:  # a web server may have no ranges, and need not seek
            self._stream.seek(start)
        block = self._stream.read(min(self._checksums.block_bytes, self._checksums.size - start))
        if not self._checksums.matches(number, block):
            raise changed_inputs_error([self.name])
        return block


def _crc(block: bytes) -> bytes:
    return zlib.crc32(block).to_bytes(CRC_BYTES, "little")
