"""Megatron-LM's .bin files, which hold only tokens. The shard's details hold the .idx.

The files are indexed in place, never written.
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
HEADER_BYTES = len(MAGIC) + 8 + 1 + 2 * 8
"""Bytes before an .idx's arrays: magic, version, type, numbers of sequences and documents."""
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
        self, read: Reader, size: int, first: int, end: int, *, details: dict[str, object]
    ) -> list[DocumentOrigin]:
        return [DocumentOrigin(str(details["file"]), number) for number in range(first, end)]

    def recognises(self, names: Sequence[str]) -> bool:
        return any(name.endswith(".idx") for name in names)

    def external_shards(self, url: str, column: str, dtype: str | None) -> Iterator[ExternalShard]:
        files = set(storage.list_files(url))
        indexes, bins = (
            {name.removesuffix(ending) for name in files if name.endswith(ending)}
            for ending in (".idx", ".bin")
        )
        for stem in sorted(indexes ^ bins):
            ending, missing_ending = (".idx", ".bin") if stem in indexes else (".bin", ".idx")
            raise InputError(
                f"{storage.join(url, stem)}{ending} has no {stem}{missing_ending} beside it",
                hint="restore the other file, or move this one out of the folder",
            )
        for stem in sorted(indexes):
            id_type, details = parse_index(storage.read(storage.join(url, f"{stem}.idx")), stem)
            shard = ExternalShard(
                name=f"{stem}.bin",
                size=storage.size(storage.join(url, f"{stem}.bin")),
                dtype=id_type,
                details=details,
            )
            expected_size = _starts(details)[-1] * np.dtype(id_type).itemsize
            if shard.size != expected_size:
                raise IntegrityError(
                    f"{storage.join(url, shard.name)} has {shard.size:,} bytes; the documents of "
                    f"its .idx have {expected_size:,}",
                    hint="restore both files from one copy of the dataset",
                )
            yield shard


def parse_index(index: bytes, stem: str) -> tuple[str, dict[str, object]]:
    """Return the id type and the shard's details, from an .idx."""
    file = f"{stem}.idx"
    if not index.startswith(MAGIC) or int.from_bytes(index[9:17], "little") != 1:
        raise InputError(f"{file} is not a Megatron index of version 1")
    if len(index) < HEADER_BYTES:
        raise IntegrityError(f"{file} is truncated")
    type_code = index[17]
    if type_code not in TYPES:
        raise InputError(f"{file} holds no ids (its type code is {type_code})")
    num_sequences = int.from_bytes(index[18:26], "little")
    num_bounds = int.from_bytes(index[26:34], "little")
    if len(index) < HEADER_BYTES + 12 * num_sequences + 8 * num_bounds:
        raise IntegrityError(f"{file} is truncated")
    sequence_lengths = np.frombuffer(index, np.int32, num_sequences, HEADER_BYTES).astype(np.int64)
    pointers = np.frombuffer(index, np.int64, num_sequences, HEADER_BYTES + 4 * num_sequences)
    document_bounds = np.frombuffer(index, np.int64, num_bounds, HEADER_BYTES + 12 * num_sequences)
    sequence_starts = np.concatenate([[0], np.cumsum(sequence_lengths)])
    if not np.array_equal(pointers, sequence_starts[:-1] * np.dtype(TYPES[type_code]).itemsize):
        raise InputError(f"the documents of {file} are not contiguous")
    # Ids before the first document, or after the last one, would be read as parts of documents.
    covers_all = num_bounds > 0 and document_bounds[0] == 0 and document_bounds[-1] == num_sequences
    if not covers_all or np.any(np.diff(document_bounds) < 0):
        raise IntegrityError(f"the documents of {file} are not made of its sequences")
    lengths = np.diff(sequence_starts[document_bounds])
    encoded = base64.b64encode(zlib.compress(lengths.tobytes())).decode()
    return TYPES[type_code], {"lengths": encoded, "file": f"{stem}.bin"}


def _starts(details: dict[str, object]) -> Int64:
    """Return a shard's document starts, then the number of tokens."""
    data = zlib.decompress(base64.b64decode(str(details["lengths"])))
    return np.cumsum([0, *np.frombuffer(data, np.int64)], dtype=np.int64)


FORMAT = MegatronFormat()
