"""Megatron-LM's .bin files, which hold only tokens. The shard's details hold their .idx.

They are indexed in place, never written.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from ...console.errors import InputError, IntegrityError
from ..arrays import Int64
from ..storage import storage
from .documents import DocumentOrigin
from .format import ExternalShard, Reader, ShardFormat, ShardLayout

MAGIC = b"MMIDIDX\x00\x00"
HEAD = len(MAGIC) + 8 + 1 + 2 * 8
"""Bytes before the arrays of an .idx: magic, version, type, numbers of sequences and documents."""
TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


class MegatronFormat(ShardFormat):
    """Megatron-LM's .bin and .idx files, read-only."""

    external_files = ".bin files with an .idx each"

    def layout(
        self, read: Reader, size: int, *, dtype: str, details: dict[str, object]
    ) -> ShardLayout:
        data = zlib.decompress(base64.b64decode(str(details["lengths"])))
        starts = np.cumsum([0, *np.frombuffer(data, np.int64)], dtype=np.int64)
        if starts[-1] * np.dtype(dtype).itemsize > size:
            raise IntegrityError("the .bin file ends before the documents of its .idx do")
        return ShardLayout(starts, starts[[0, -1]], np.zeros(1, np.int64))

    def origins(
        self, read: Reader, size: int, first: int, last: int, *, details: dict[str, object]
    ) -> list[DocumentOrigin]:
        return [DocumentOrigin(str(details["file"]), number) for number in range(first, last)]

    def recognises(self, names: Sequence[str]) -> bool:
        return any(name.endswith(".idx") for name in names)

    def external_shards(self, url: str, column: str, dtype: str | None) -> Iterator[ExternalShard]:
        for name in storage.list_files(url):
            if not name.endswith(".idx"):
                continue
            data = name.removesuffix(".idx") + ".bin"
            kind, details = details_of(storage.read(storage.join(url, name)), name)
            yield ExternalShard(
                name=data,
                size=storage.size(storage.join(url, data)),
                dtype=kind,
                details={**details, "file": data},
            )


def details_of(index: bytes, name: str) -> tuple[str, dict[str, object]]:
    """Return the type of a .bin's ids, and the details of its shard, from its .idx."""
    if not index.startswith(MAGIC) or int.from_bytes(index[9:17], "little") != 1:
        raise InputError(f"{name} is not a Megatron index of version 1")
    if len(index) < HEAD:
        raise IntegrityError(f"{name} is truncated")
    kind = index[17]
    if kind not in TYPES:
        raise InputError(f"{name} holds no ids (its type code is {kind})")
    sequences = int.from_bytes(index[18:26], "little")
    edges = int.from_bytes(index[26:34], "little")
    if len(index) < HEAD + 12 * sequences + 8 * edges:
        raise IntegrityError(f"{name} is truncated")
    sizes = np.frombuffer(index, np.int32, sequences, HEAD).astype(np.int64)
    pointers = np.frombuffer(index, np.int64, sequences, HEAD + 4 * sequences)
    documents = np.frombuffer(index, np.int64, edges, HEAD + 12 * sequences)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    if not np.array_equal(pointers, starts[:-1] * np.dtype(TYPES[kind]).itemsize):
        raise InputError(f"the documents of {name} are not contiguous")
    if np.any(np.diff(documents, prepend=0, append=sequences) < 0):
        raise IntegrityError(f"the documents of {name} are not made of its sequences")
    lengths = _documents(starts, documents)
    packed = base64.b64encode(zlib.compress(lengths.tobytes())).decode()
    return TYPES[kind], {"lengths": packed, "file": name}


def _documents(starts: Int64, documents: Sequence[int] | Int64) -> Int64:
    """Return the lengths of documents, each made of consecutive sequences."""
    return np.diff(starts[np.asarray(documents)])


FORMAT = MegatronFormat()
