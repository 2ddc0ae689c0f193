"""Compressed shards. The file ending tells the algorithm, as in mosaicml's `streaming`; Arrow files
have compressed buffers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...console.errors import InputError, IntegrityError

ALGORITHMS = {"zstd": "zstd", "gz": "gzip", "br": "brotli", "snappy": "snappy", "bz2": "bz2"}
"""File ending → the algorithm's name in pyarrow."""

GZIP_WBITS = 16 + 15
"""zlib's number for a gzip header and the largest window."""
ARROW_ENDINGS = (".arrow", ".feather")


def compression_algorithm(name: str) -> str:
    """Return the algorithm for a file name."""
    ending = name.rpartition(".")[2]
    if ending not in ALGORITHMS:
        raise InputError(
            f"{name} is compressed by an unknown algorithm",
            hint=f"known endings: {', '.join(ALGORITHMS)}; decompress the shards, or compress them "
            "by one of these",
        )
    return ALGORITHMS[ending]


def decompress_shard(where: str, packed: bytes, size: int, details: Mapping[str, object]) -> bytes:
    """Return a shard's content; the compressed file `where` holds `packed`."""
    from .arrow_flat import flatten

    if where.endswith(ARROW_ENDINGS):
        return flatten(where, packed, str(details["column"]))
    return decompress(where, packed, size)


def decompress(where: str, packed: bytes, size: int) -> bytes:
    """Return `size` decompressed bytes; the file `where` holds `packed`."""
    import bz2
    import zlib

    import pyarrow as pa

    codec = compression_algorithm(where)
    data: bytes
    try:
        # pyarrow's `decompress` leaves the buffer's end undefined where a gzip, brotli or snappy
        # file holds fewer bytes.
        if codec == "bz2":
            data = _decompress_stream(bz2.BZ2Decompressor(), packed, size)
        elif codec == "gzip":
            data = _decompress_stream(zlib.decompressobj(GZIP_WBITS), packed, size)
        elif codec == "brotli":
            with pa.CompressedInputStream(pa.BufferReader(packed), codec) as stream:
                data = stream.read(size + 1)
        elif codec == "snappy" and _snappy_size(packed) != size:
            data = b""
        else:
            data = pa.decompress(packed, decompressed_size=size, codec=codec, asbytes=True)
    except (pa.ArrowInvalid, OSError, EOFError, zlib.error) as error:
        raise IntegrityError(f"{where} cannot be decompressed: {error}") from None
    if len(data) != size:
        raise IntegrityError(f"{where} cannot be decompressed: it holds other than {size:,} bytes")
    return data


def _decompress_stream(stream: Any, packed: bytes, size: int) -> bytes:
    """Return up to `size` + 1 bytes from a bz2 or zlib stream; raise if its end is missing."""
    data: bytes = stream.decompress(packed, size + 1)
    if not stream.eof:
        raise EOFError("its end is missing")
    return data


def _snappy_size(packed: bytes) -> int:
    """Read the size at the start of a raw snappy block: seven bits a byte, the lowest first."""
    size = 0
    for index, byte in enumerate(packed[:5]):
        size |= (byte & 127) << (7 * index)
        if byte < 128:
            break
    return size
