"""Open input files by path or URL; decompress them by their first bytes."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, cast

from ...console.errors import InputError
from ...dataplane.storage import storage
from .input_file import BLOCK_BYTES, DamagedFile, File
from .web import WebFile, is_web

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
"""First bytes of compressed files."""


def open_file(name: str) -> BinaryIO:
    """Open an input file for reading; it is seekable where its store allows that."""
    if storage.is_local(name):
        try:
            return storage.local_path(name).open("rb")
        except OSError as error:
            raise InputError(f"cannot read {name}: {error.strerror}") from None
    opened = WebFile(name) if is_web(name) else RemoteFile(name)
    return cast(BinaryIO, io.BufferedReader(opened, BLOCK_BYTES))


class RemoteFile(io.RawIOBase):
    """A remote file, read by byte ranges; each range is retried on transient errors."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.size = storage.size(url)
        self.at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def tell(self) -> int:
        return self.at

    def readinto(self, buffer: Any) -> int:
        end = min(self.size, self.at + len(buffer))
        if end <= self.at:
            return 0
        data = storage.read(self.url, self.at, end)
        buffer[: len(data)] = data
        self.at += len(data)
        return len(data)


def is_compressed(head: bytes) -> bool:
    """Return True if these first bytes are those of a compressed file."""
    return head.startswith((GZIP, ZSTD))


def decompressed(file: File) -> Iterator[tuple[bytes, int]]:
    """Yield a whole file in decompressed blocks, each with the bytes of the file read for it."""
    with open_file(file.name) as stream:
        before = 0
        for block in _decompress(file, stream):
            at = stream.tell()
            yield block, at - before
            before = at


def _decompress(file: File, stream: BinaryIO) -> Iterator[bytes]:
    head = stream.read(4)
    if head.startswith(GZIP):
        yield from _gunzip(head, stream)
    elif head == ZSTD:
        yield from _unzstd(head, stream)
    else:
        if file.compression and head:
            raise DamagedFile(f"its name says {file.compression}, its first bytes do not")
        chunk = head + read_full(stream, BLOCK_BYTES - len(head))
        while chunk:
            yield chunk
            chunk = read_full(stream, BLOCK_BYTES)


def _gunzip(data: bytes, stream: BinaryIO) -> Iterator[bytes]:
    """Decompress gzip with any number of members."""
    inflate: Any = zlib.decompressobj(31)
    try:
        while True:
            if inflate.eof:
                data = inflate.unused_data + data
                data = data or stream.read(BLOCK_BYTES // 4)
                if not data.strip(b"\0"):
                    return
                inflate = zlib.decompressobj(31)
            out = inflate.decompress(data, BLOCK_BYTES)
            if out:
                yield out
            data = inflate.unconsumed_tail
            if inflate.eof or data or len(out) == BLOCK_BYTES:
                continue
            data = stream.read(BLOCK_BYTES // 4)
            if not data:
                raise DamagedFile("the gzip stream is cut off")
    except zlib.error as error:
        raise DamagedFile(f"the gzip stream is damaged ({error})") from None


def _unzstd(data: bytes, stream: BinaryIO) -> Iterator[bytes]:
    """Decompress zstd with any number of frames."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    inflate = decompressor.decompressobj()
    feed = 64 << 10
    try:
        while True:
            if inflate.eof:
                data = inflate.unused_data + data
                data = data or stream.read(feed)
                if not data:
                    return
                inflate = decompressor.decompressobj()
            out = inflate.decompress(data)
            for at in range(0, len(out), BLOCK_BYTES):
                yield out[at : at + BLOCK_BYTES]
            # The library inflates its whole input at once: feed less if it inflates a lot.
            feed = max(256, feed // 2) if len(out) > 4 * BLOCK_BYTES else feed
            data = b""
            if not inflate.eof:
                data = stream.read(feed)
                if not data:
                    raise DamagedFile("the zstd stream is cut off")
    except zstandard.ZstdError as error:
        raise DamagedFile(f"the zstd stream is damaged ({error})") from None


def read_full(stream: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, or all that are left if there are fewer."""
    parts = []
    while size > 0 and (part := stream.read(min(size, 16 << 20))):
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
