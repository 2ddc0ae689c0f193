"""Compressed shards: every algorithm of mosaicml's streaming, and damaged files."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable

import brotli
import pytest
import snappy
import zstandard

from headrace.console.errors import InputError, IntegrityError
from headrace.dataplane.shards.compression import ALGORITHMS, decompress

DATA = bytes(range(256)) * 300
PACKED: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstandard.ZstdCompressor().compress,
    "gz": gzip.compress,
    "br": brotli.compress,
    "snappy": snappy.compress,
    "bz2": bz2.compress,
}


@pytest.mark.parametrize("ending", ALGORITHMS)
def test_every_algorithm(ending: str) -> None:
    packed = PACKED[ending](DATA)
    assert decompress(f"a.mds.{ending}", packed, len(DATA)) == DATA
    damaged = packed[:20] + bytes([packed[20] ^ 255]) + packed[21:]
    for bad in (packed[:-9], b"", damaged):
        try:
            assert decompress(f"a.mds.{ending}", bad, len(DATA)) != DATA  # its hash shows it
        except IntegrityError as error:
            assert f"a.mds.{ending} cannot be decompressed" in error.message
    for size in (len(DATA) - 1, len(DATA) + 1, 2 * len(DATA)):
        with pytest.raises(IntegrityError, match="cannot be decompressed"):
            decompress(f"a.mds.{ending}", packed, size)


def test_an_unknown_algorithm_is_named() -> None:
    with pytest.raises(InputError, match=r"a\.mds\.lz9 is compressed by an unknown") as caught:
        decompress("a.mds.lz9", b"", 1)
    assert "zstd, gz, br, snappy, bz2" in str(caught.value.hint)
