"""MDS files, which mosaicml's `streaming.StreamingDataset` reads unmodified.

    count: uint32 | offsets: (count + 1) × uint32 | JSON config | token counts | samples

A sample holds the sizes of its variable columns, then the columns: tokens, weights (if any), file,
position, id (empty where the corpus has none). headrace adds the token counts between the config
and the first sample: MDS readers follow the offsets and skip them, and headrace locates every token
without reading a sample. In files of other programs the sizes of each sample are read instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...console.errors import InputError, IntegrityError
from ..arrays import Int64
from ..storage import storage
from .compression import algorithm, decompress
from .documents import DocumentOrigin, ShardDocuments
from .format import ExternalShard, Reader, ShardFormat, ShardLayout, StoredShard
from .mds_external import external_layout, id_type, places

LIMIT = 2**32
"""Upper limit of a file's size: offsets are uint32."""

MARK = "headrace"
FIXED = {"int": 8, "uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "int64": 8, "uint64": 8}
FIXED |= {"int8": 1, "int16": 2, "float16": 2, "float32": 4, "float64": 8}


class MdsFormat(ShardFormat):
    """MDS, with the dataset's index.json for StreamingDataset."""

    compressible = True
    index_name = "index.json"
    external_files = "an index.json"
    index_options = ("column", "dtype")

    def write(self, out: BinaryIO, documents: ShardDocuments) -> None:
        config = json.dumps(
            {
                **index_columns(
                    documents.tokens.dtype.name, weighted=documents.weights is not None
                ),
                MARK: {"counts": len(documents)},
            }
        ).encode()
        lengths = np.diff(documents.starts)
        assert not len(lengths) or lengths.min() > 0, "a document holds at least its end token"
        counts = lengths.astype(np.uint32).tobytes()
        samples = _samples(documents)
        sizes = np.fromiter((len(sample) for sample in samples), np.int64, len(samples))
        head = 4 + 4 * (len(samples) + 1) + len(config) + len(counts)
        offsets = np.concatenate([[0], np.cumsum(sizes)]) + head
        if offsets[-1] >= LIMIT:
            raise InputError(
                f"a shard of {offsets[-1]} bytes is too large: MDS files are limited to 4 GiB",
                hint="choose a smaller --shard-size, or split documents (--max-document-tokens)",
            )
        out.write(np.uint32(len(samples)).tobytes())
        out.write(offsets.astype(np.uint32).tobytes())
        out.write(config)
        out.write(counts)
        out.writelines(samples)

    def layout(
        self, read: Reader, size: int, *, dtype: str, details: dict[str, object]
    ) -> ShardLayout:
        offsets, config, end = _head(read, size)
        samples = len(offsets) - 1
        if MARK not in config:
            column = str(details.get("column", "tokens"))
            return external_layout(read, offsets, config, dtype, column)
        data = read(end, end + 4 * samples)
        lengths = np.frombuffer(data, np.uint32).astype(np.int64)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        variable = config["column_sizes"].count(None)
        # An array's values follow one byte for the kind of shape, and the shape.
        shape = 1 + np.select([lengths < 1 << 8, lengths < 1 << 16], [1, 2], 4)
        tokens = offsets[:-1] + 4 * variable + shape
        weights = tokens + lengths * np.dtype(dtype).itemsize + shape
        return ShardLayout(
            document_starts=starts,
            run_tokens=starts,
            run_bytes=tokens,
            weight_bytes=weights if "weights" in config["column_names"] else None,
        )

    def origins(
        self, read: Reader, size: int, first: int, last: int, *, details: dict[str, object]
    ) -> list[DocumentOrigin]:
        offsets, config, _ = _head(read, size)
        if MARK not in config:
            return [
                DocumentOrigin(str(details.get("file", "")), number)
                for number in range(first, last)
            ]
        origins = []
        for number in range(first, last):
            sample = read(int(offsets[number]), int(offsets[number + 1]))
            place = places(sample, config)
            start, end = place["position"]
            position = int(np.frombuffer(sample[start:end], np.int64)[0])
            id = sample[slice(*place["id"])].decode()
            origins.append(
                DocumentOrigin(sample[slice(*place["file"])].decode(), position, id or None)
            )
        return origins

    def index(
        self,
        shards: Sequence[StoredShard],
        *,
        dtype: str,
        weighted: bool,
        compression: str | None,
    ) -> bytes:
        entries = [
            {
                **index_columns(dtype, weighted=weighted),
                "compression": compression,
                "hashes": [],
                "raw_data": {"basename": shard.name, "bytes": shard.size, "hashes": {}},
                "samples": shard.documents,
                "size_limit": None,
                "zip_data": None
                if shard.stored_name is None
                else {"basename": shard.stored_name, "bytes": shard.stored_size, "hashes": {}},
            }
            for shard in shards
        ]
        return json.dumps({"version": 2, "shards": entries}, sort_keys=True).encode()

    def index_problem(self, folder: Path, shards: Sequence[StoredShard]) -> str | None:
        """Open the index with StreamingDataset's own reader and compare its document counts."""
        from streaming.base.format import reader_from_json

        try:
            entries = json.loads((folder / "index.json").read_text())["shards"]
            counts = [reader_from_json(str(folder), None, entry).size for entry in entries]
        except (OSError, ValueError, KeyError) as error:
            return f"streaming cannot read it: {error!r}"
        if counts != [shard.documents for shard in shards]:
            listed = f"{sum(counts):,} documents in {len(counts):,} shards"
            return f"it lists {listed}; the manifest has others"
        return None

    def recognises(self, names: Sequence[str]) -> bool:
        return "index.json" in names

    def external_shards(self, url: str, column: str, dtype: str | None) -> Iterator[ExternalShard]:
        for entry in _listed(url):
            raw, packed = entry["raw_data"], entry["zip_data"]
            if packed is not None:
                algorithm(packed["basename"])
            yield ExternalShard(
                name=raw["basename"],
                size=raw["bytes"],
                dtype=id_type(entry, column, dtype, partial(_first_value, url, entry, column)),
                details={"column": column, "file": raw["basename"]},
                stored_name=None if packed is None else packed["basename"],
                stored_size=None if packed is None else packed["bytes"],
            )


def index_columns(dtype: str, *, weighted: bool) -> dict[str, Any]:
    """Return the description of the columns, for a shard's config and for index.json."""
    encodings = {"tokens": f"ndarray:{dtype}"}
    if weighted:
        encodings["weights"] = "ndarray:uint8"
    encodings |= {"file": "str", "position": "int", "id": "str"}
    return {
        "column_names": list(encodings),
        "column_encodings": list(encodings.values()),
        "column_sizes": [FIXED.get(encoding) for encoding in encodings.values()],
        "format": "mds",
        "version": 2,
    }


def _samples(documents: ShardDocuments) -> list[bytes]:
    names = [name.encode() for name in documents.files]
    width = documents.tokens.itemsize
    tokens = memoryview(documents.tokens.tobytes())
    weights = None if documents.weights is None else memoryview(documents.weights.tobytes())
    ids = documents.ids or (None,) * len(documents)
    starts = documents.starts.tolist()
    samples = []
    for number, (file, position, id) in enumerate(
        zip(documents.file.tolist(), documents.position.tolist(), ids, strict=True)
    ):
        start, end = starts[number], starts[number + 1]
        name, own, shape = names[file], (id or "").encode(), _shape(end - start)
        sizes = [len(shape) + (end - start) * width, len(name), len(own)]
        parts: list[bytes | memoryview] = [shape, tokens[start * width : end * width]]
        if weights is not None:
            sizes.insert(1, len(shape) + end - start)
            parts += [shape, weights[start:end]]
        parts += [name, position.to_bytes(8, "little", signed=True), own]
        samples.append(b"".join([b"".join(n.to_bytes(4, "little") for n in sizes), *parts]))
    return samples


def _shape(length: int) -> bytes:
    """Return the MDS header of a one-dimensional array: ndim, the width of the shape, the shape."""
    power = 0 if length < 1 << 8 else 1 if length < 1 << 16 else 2
    return bytes([1 << 2 | power]) + length.to_bytes(1 << power, "little")


def _head(read: Reader, size: int) -> tuple[Int64, dict[str, Any], int]:
    """Return the samples' offsets, the config, and the offset of its end."""
    count = int.from_bytes(read(0, 4), "little")
    at = 4 + 4 * (count + 1)
    if at > size:
        raise IntegrityError("not a whole MDS file: its table of offsets is truncated")
    offsets = np.frombuffer(read(4, at), np.uint32).astype(np.int64)
    if offsets[-1] != size or np.any(np.diff(offsets) < 0):
        raise IntegrityError("not a whole MDS file: its last offset is not its size")
    text = read(at, int(offsets[0])).decode("latin-1")
    try:
        config, length = json.JSONDecoder().raw_decode(text)
    except ValueError:
        raise IntegrityError("not an MDS file: it has no config after its offsets") from None
    return offsets, config, at + length


def _first_value(url: str, entry: dict[str, Any], column: str) -> bytes:
    """Return the column of a shard's first sample; empty if the shard has no sample."""
    raw, packed = entry["raw_data"], entry["zip_data"]
    if packed is None:
        read: Reader = partial(storage.read, storage.join(url, raw["basename"]))
    else:
        where = storage.join(url, packed["basename"])
        read = partial(_part, decompress(where, storage.read(where), raw["bytes"]))
    offsets, config, _ = _head(read, raw["bytes"])
    if len(offsets) < 2:
        return b""
    sample = read(int(offsets[0]), int(offsets[1]))
    return sample[slice(*places(sample, config)[column])]


def _part(data: bytes, start: int, end: int) -> bytes:
    return data[start:end]


def _listed(url: str) -> list[dict[str, Any]]:
    """Return the shards that index.json lists; raise if there are others beside them."""
    where = storage.join(url, "index.json")
    try:
        entries: list[dict[str, Any]] = json.loads(storage.read(where))["shards"]
        names = {entry["raw_data"]["basename"] for entry in entries}
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{where} is not a whole index of MDS shards: {error!r}", hint="restore it from a copy"
        ) from None
    folders = {name.rpartition("/")[0] for name in names}
    orphans = [
        name
        for name in storage.list_files(url)
        if (found := re.match(r"(?:(.*)/)?[^/]*\.mds(?=$|\.)", name))
        and (found[1] or "") in folders
        and found[0] not in names
    ]
    if orphans:
        raise InputError(
            f"{where} does not list {len(orphans)} MDS files beside it: {', '.join(orphans[:5])}",
            hint="restore index.json, or move these files out of the folder",
        )
    return entries


FORMAT = MdsFormat()
