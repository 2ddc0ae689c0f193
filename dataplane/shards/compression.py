"""Shards that are stored compressed: the algorithm by the ending of the stored file's name, as
mosaicml's `streaming` names them; Arrow files compress their own buffers."""

from __future__ import annotations

from collections.abc import Mapping

from ...console.errors import InputError, IntegrityError

ALGORITHMS = {"zstd": "zstd", "gz": "gzip", "br": "brotli", "snappy": "snappy", "bz2": "bz2"}
"""pyarrow's name of an algorithm, by the ending of a file's name."""

ARROW_ENDINGS = (".arrow", ".feather")


def algorithm(name: str) -> str:
    """Return the algorithm of a compressed shard's file."""
    ending = name.rpartition(".")[2]
    if ending not in ALGORITHMS:
        raise InputError(
            f"{name} is compressed by an unknown algorithm",
            hint=f"known endings: {', '.join(ALGORITHMS)}; decompress the shards, or compress them "
            "by one of these",
        )
    return ALGORITHMS[ending]


def unpack(where: str, packed: bytes, size: int, details: Mapping[str, object]) -> bytes:
    """Return the bytes of a shard whose compressed file `where` holds `packed`."""
    from .arrow_flat import flatten

    if where.endswith(ARROW_ENDINGS):
        return flatten(where, packed, str(details["column"]))
    return decompress(where, packed, size)


def decompress(where: str, packed: bytes, size: int) -> bytes:
    """Return the `size` bytes of a shard whose compressed file `where` holds `packed`."""
    import bz2

    import pyarrow as pa

    codec = algorithm(where)
    try:
        if not packed:  # pyarrow's gzip would return memory as it was
            raise EOFError("it is empty")
        if codec == "bz2":  # pyarrow reads it as a stream only
            stream = bz2.BZ2Decompressor()
            data = stream.decompress(packed, size + 1)
            if not stream.eof:
                raise EOFError("its end is missing")
        else:
            data = pa.decompress(packed, decompressed_size=size, codec=codec, asbytes=True)
    except (pa.ArrowInvalid, OSError, EOFError) as error:
        raise IntegrityError(f"{where} cannot be decompressed: {error}") from None
    if len(data) != size:
        raise IntegrityError(f"{where} cannot be decompressed: it holds other than {size:,} bytes")
    return bytes(data)
