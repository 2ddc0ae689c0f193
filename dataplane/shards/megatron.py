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
        starts = _starts(details)
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
        files = set(storage.list_files(url))
        indexed = {name.removesuffix(".idx") for name in files if name.endswith(".idx")}
        for stem in sorted(indexed ^ {n.removesuffix(".bin") for n in files if n.endswith(".bin")}):
            here, lost = (".idx", ".bin") if stem in indexed else (".bin", ".idx")
            raise InputError(
                f"{storage.join(url, stem)}{here} has no {stem}{lost} beside it",
                hint="restore the other file, or move this one out of the folder",
            )
        for stem in sorted(indexed):
            kind, details = details_of(storage.read(storage.join(url, f"{stem}.idx")), stem)
            shard = ExternalShard(
                name=f"{stem}.bin",
                size=storage.size(storage.join(url, f"{stem}.bin")),
                dtype=kind,
                details=details,
            )
            needed = _starts(details)[-1] * np.dtype(kind).itemsize
            if shard.size != needed:
                raise IntegrityError(
                    f"{storage.join(url, shard.name)} has {shard.size:,} bytes; the documents of "
                    f"its .idx have {needed:,}",
                    hint="restore both files from one copy of the dataset",
                )
            yield shard


def details_of(index: bytes, stem: str) -> tuple[str, dict[str, object]]:
    """Return the type of a .bin's ids, and the details of its shard, from its .idx."""
    name = f"{stem}.idx"
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
    # Ids before the first document, or after the last one, would be read as parts of documents.
    covered = edges > 0 and documents[0] == 0 and documents[-1] == sequences
    if not covered or np.any(np.diff(documents) < 0):
        raise IntegrityError(f"the documents of {name} are not made of its sequences")
    lengths = _documents(starts, documents)
    packed = base64.b64encode(zlib.compress(lengths.tobytes())).decode()
    return TYPES[kind], {"lengths": packed, "file": f"{stem}.bin"}


def _starts(details: dict[str, object]) -> Int64:
    """Return the token offsets of the documents of a shard, and their end."""
    data = zlib.decompress(base64.b64decode(str(details["lengths"])))
    return np.cumsum([0, *np.frombuffer(data, np.int64)], dtype=np.int64)


def _documents(starts: Int64, documents: Sequence[int] | Int64) -> Int64:
    """Return the lengths of documents, each made of consecutive sequences."""
    return np.diff(starts[np.asarray(documents)])


FORMAT = MegatronFormat()
