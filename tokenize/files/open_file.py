"""Open input files by path or URL; decompress them by their first bytes."""

from __future__ import annotations

import io
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, cast

from ...console.errors import InputError, file_fault
from ...console.explain import path_hint
from ...dataplane.storage import storage
from .checksums import VerifiedFile
from .input_file import BLOCK_BYTES, DamagedFile, File, is_web

HEAD_BYTES = 10
"""First bytes of a file, which show the compression."""
GZIP, ZSTD, XZ, BZIP2 = b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\0", b"BZh"
BZIP2_BLOCKS = (b"1AY&SY", b"\x17rE8P\x90")
"""Bytes 4 to 10 of a bzip2 file: first block, or end. A text may begin with `BZh` too."""


def open_file(name: str) -> BinaryIO:
    """Open an input file for reading; seekable if its store allows that."""
    if storage.is_local(name):
        path = storage.local_path(name)
        try:
            return path.open("rb")
        except OSError as error:
            reason, hint = file_fault(error)
            if isinstance(error, FileNotFoundError):
                reason, hint = "it does not exist", path_hint(path, "check the path")
            raise InputError(f"cannot read {name}: {reason}", hint=hint) from None
    return cast(BinaryIO, io.BufferedReader(_open_remote(name), BLOCK_BYTES))


def _open_remote(url: str) -> io.RawIOBase:
    if not is_web(url):
        return RemoteFile(url)
    from .web import WebFile  # imports ssl

    return WebFile(url)


def open_input(file: File) -> BinaryIO:
    """Open a corpus file for reading; reads raise InputError if content differs from its hash."""
    stream = open_file(file.place)
    if file.checksums is None:
        return stream
    return cast(BinaryIO, io.BufferedReader(VerifiedFile(stream, file.checksums, file.name)))


class RemoteFile(io.RawIOBase):
    """A remote file, read by byte ranges; a range is retried after transient errors."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.size = storage.size(url)
        self.position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.size}[whence]
        )
        return self.position

    def tell(self) -> int:
        return self.position

    def readinto(self, buffer: Any) -> int:
        end = min(self.size, self.position + len(buffer))
        if end <= self.position:
            return 0
        data = storage.read(self.url, self.position, end)
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def is_compressed(head: bytes) -> bool:
    """Return True if a file with these first HEAD_BYTES bytes is compressed."""
    return _decompressor(head) is not None


def detect_compression(stream: BinaryIO) -> str | None:
    """Detect the compression of a file by its first bytes: a value for `File.compression`, or
    None."""
    names: dict[Any, str] = {_gunzip: "gzip", _unzstd: "zstd", _unxz: "xz", _unbzip2: "bzip2"}
    decompressor = _decompressor(stream.read(HEAD_BYTES))
    return None if decompressor is None else names[decompressor]


def read_decompressed(file: File) -> Iterator[tuple[bytes, int]]:
    """Yield a whole file in decompressed blocks, each with the bytes of the file read for it."""
    with open_input(file) as stream:
        previous_position = 0
        for block in _decompress(file, stream):
            position = stream.tell()
            yield block, position - previous_position
            previous_position = position


def _decompress(file: File, stream: BinaryIO) -> Iterator[bytes]:
    head = stream.read(HEAD_BYTES)
    decompressor = _decompressor(head)
    if decompressor is not None:
        yield from decompressor(head, stream)
        return
    if file.compression and head:
        raise DamagedFile(f"its name says {file.compression}, its first bytes do not")
    chunk = head + read_full(stream, BLOCK_BYTES - len(head))
    while chunk:
        yield chunk
        chunk = read_full(stream, BLOCK_BYTES)


def _decompressor(head: bytes) -> Callable[[bytes, BinaryIO], Iterator[bytes]] | None:
    """Return the function that decompresses a file with these first bytes, or None."""
    if head.startswith(GZIP):
        return _gunzip
    if head.startswith(ZSTD):
        return _unzstd
    if head.startswith(XZ):
        return _unxz
    if head.startswith(BZIP2) and head[4:].startswith(BZIP2_BLOCKS):
        return _unbzip2
    return None


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


def _unxz(data: bytes, stream: BinaryIO) -> Iterator[bytes]:
    """Decompress xz with any number of streams, and zero bytes between them."""
    import lzma

    def start() -> Any:
        return lzma.LZMADecompressor(format=lzma.FORMAT_XZ)

    yield from _decompress_streams("xz", start, (lzma.LZMAError,), data, stream, padding=b"\0")


def _unbzip2(data: bytes, stream: BinaryIO) -> Iterator[bytes]:
    """Decompress bzip2 with any number of streams."""
    import bz2

    yield from _decompress_streams(
        "bzip2", bz2.BZ2Decompressor, (OSError, ValueError), data, stream
    )


def _decompress_streams(
    name: str,
    start: Callable[[], Any],
    faults: tuple[type[Exception], ...],
    data: bytes,
    stream: BinaryIO,
    padding: bytes = b"",
) -> Iterator[bytes]:
    """Decompress concatenated streams by standard-library decompressors, which handle one."""
    inflate = start()
    while True:
        if inflate.eof:
            data = inflate.unused_data.lstrip(padding)
            while not data:
                data = stream.read(BLOCK_BYTES // 4)
                if not data:
                    return
                data = data.lstrip(padding)
            inflate = start()
        try:
            out = inflate.decompress(data, BLOCK_BYTES)
        except faults as error:
            raise DamagedFile(f"the {name} stream is damaged ({error})") from None
        if out:
            yield out
        data = b""
        if not inflate.eof and inflate.needs_input:
            data = stream.read(BLOCK_BYTES // 4)
            if not data:
                raise DamagedFile(f"the {name} stream is cut off")


def _unzstd(data: bytes, stream: BinaryIO) -> Iterator[bytes]:
    """Decompress zstd with any number of frames."""
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    inflate = decompressor.decompressobj()
    feed_bytes = 64 << 10
    try:
        while True:
            if inflate.eof:
                data = inflate.unused_data + data
                data = data or stream.read(feed_bytes)
                if not data:
                    return
                inflate = decompressor.decompressobj()
            out = inflate.decompress(data)
            for start in range(0, len(out), BLOCK_BYTES):
                yield out[start : start + BLOCK_BYTES]
            # The library inflates its whole input at once: feed less if it inflates a lot.
            feed_bytes = max(256, feed_bytes // 2) if len(out) > 4 * BLOCK_BYTES else feed_bytes
            data = b""
            if not inflate.eof:
                data = stream.read(feed_bytes)
                if not data:
                    raise DamagedFile("the zstd stream is cut off")
    except zstandard.ZstdError as error:
        raise DamagedFile(f"the zstd stream is damaged ({error})") from None


def read_full(stream: BinaryIO, size: int) -> bytes:
    """Read `size` bytes, or fewer if the stream ends."""
    blocks = []
    while size > 0 and (block := stream.read(min(size, 16 << 20))):
        blocks.append(block)
        size -= len(block)
    return b"".join(blocks)
