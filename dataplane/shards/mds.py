"""MDS files, which mosaicml's `streaming.StreamingDataset` reads unmodified.

    count: uint32 | offsets: (count + 1) × uint32 | JSON config | token counts | samples

A sample holds the sizes of variable columns, then the columns: tokens, weights (if any), file,
position, id (empty where the corpus has none). headrace adds token counts between the config and
the first sample: MDS readers follow the offsets and skip them, and headrace locates every token
without reading a sample. In other programs' files, the sizes in every sample are read instead.
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
from .compression import compression_algorithm, decompress
from .documents import DocumentOrigin, ShardDocuments
from .format import ExternalShard, Reader, ShardFormat, ShardLayout, StoredShard
from .mds_external import column_ranges, external_layout, recorded_id_type

MAX_FILE_BYTES = 2**32
"""Offsets are uint32."""

CONFIG_KEY = "headrace"
FIXED_SIZES = {"int": 8, "uint8": 1, "uint16": 2, "uint32": 4, "int32": 4, "int64": 8, "uint64": 8}
FIXED_SIZES |= {"int8": 1, "int16": 2, "float16": 2, "float32": 4, "float64": 8}


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
                CONFIG_KEY: {"counts": len(documents)},
            }
        ).encode()
        lengths = np.diff(documents.starts)
        assert not len(lengths) or lengths.min() > 0, "a document holds at least its end token"
        counts = lengths.astype(np.uint32).tobytes()
        samples = _encode_samples(documents)
        sizes = np.fromiter((len(sample) for sample in samples), np.int64, len(samples))
        header_bytes = 4 + 4 * (len(samples) + 1) + len(config) + len(counts)
        offsets = np.concatenate([[0], np.cumsum(sizes)]) + header_bytes
        if offsets[-1] >= MAX_FILE_BYTES:
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
        offsets, config, config_end = _read_head(read, size)
        num_samples = len(offsets) - 1
        if CONFIG_KEY not in config:
            column = str(details.get("column", "tokens"))
            return external_layout(read, offsets, config, dtype, column)
        lengths_data = read(config_end, config_end + 4 * num_samples)
        lengths = np.frombuffer(lengths_data, np.uint32).astype(np.int64)
        document_starts = np.concatenate([[0], np.cumsum(lengths)])
        num_variable = config["column_sizes"].count(None)
        # A byte for the kind of shape, and the shape, precede an array's values.
        shape_bytes = 1 + np.select([lengths < 1 << 8, lengths < 1 << 16], [1, 2], 4)
        tokens = offsets[:-1] + 4 * num_variable + shape_bytes
        weights = tokens + lengths * np.dtype(dtype).itemsize + shape_bytes
        return ShardLayout(
            document_starts=document_starts,
            run_tokens=document_starts,
            run_bytes=tokens,
            weight_bytes=weights if "weights" in config["column_names"] else None,
        )

    def origins(
        self, read: Reader, size: int, first: int, end: int, *, details: dict[str, object]
    ) -> list[DocumentOrigin]:
        offsets, config, _ = _read_head(read, size)
        if CONFIG_KEY not in config:
            return [
                DocumentOrigin(str(details.get("file", "")), number) for number in range(first, end)
            ]
        origins = []
        for number in range(first, end):
            sample = read(int(offsets[number]), int(offsets[number + 1]))
            ranges = column_ranges(sample, config)
            position = int(np.frombuffer(sample[slice(*ranges["position"])], np.int64)[0])
            id = sample[slice(*ranges["id"])].decode()
            origins.append(
                DocumentOrigin(sample[slice(*ranges["file"])].decode(), position, id or None)
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
        """Compare what StreamingDataset takes from the index with the manifest: format, and each
        shard's name, bytes and documents."""
        try:
            entries = json.loads((folder / "index.json").read_text())["shards"]
            formats = {(entry["format"], entry["version"]) for entry in entries}
            listed = [
                (entry["raw_data"]["basename"], entry["raw_data"]["bytes"], entry["samples"])
                for entry in entries
            ]
        except (OSError, ValueError, KeyError, TypeError) as error:
            return f"it is not a whole index of MDS shards: {error!r}"
        if formats - {("mds", 2)}:
            return f"it lists shards of other formats than MDS 2: {sorted(formats)}"
        if listed != [(shard.name, shard.size, shard.documents) for shard in shards]:
            total = sum(documents for _, _, documents in listed)
            return f"it lists {total:,} documents in {len(listed):,} shards; the manifest differs"
        return None

    def recognises(self, names: Sequence[str]) -> bool:
        return "index.json" in names

    def external_shards(self, url: str, column: str, dtype: str | None) -> Iterator[ExternalShard]:
        for entry in _list_entries(url):
            uncompressed, compressed = entry["raw_data"], entry["zip_data"]
            if compressed is not None:
                compression_algorithm(compressed["basename"])
            yield ExternalShard(
                name=uncompressed["basename"],
                size=uncompressed["bytes"],
                dtype=recorded_id_type(
                    entry, column, dtype, partial(_read_first_value, url, entry, column)
                ),
                details={"column": column, "file": uncompressed["basename"]},
                stored_name=None if compressed is None else compressed["basename"],
                stored_size=None if compressed is None else compressed["bytes"],
            )


def index_columns(dtype: str, *, weighted: bool) -> dict[str, Any]:
    """Describe the columns, for a shard's config and for index.json."""
    encodings = {"tokens": f"ndarray:{dtype}"}
    if weighted:
        encodings["weights"] = "ndarray:uint8"
    encodings |= {"file": "str", "position": "int", "id": "str"}
    return {
        "column_names": list(encodings),
        "column_encodings": list(encodings.values()),
        "column_sizes": [FIXED_SIZES.get(encoding) for encoding in encodings.values()],
        "format": "mds",
        "version": 2,
    }


def _encode_samples(documents: ShardDocuments) -> list[bytes]:
    file_names = [name.encode() for name in documents.files]
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
        file_bytes, id_bytes, shape = (
            file_names[file],
            (id or "").encode(),
            _encode_shape(end - start),
        )
        sizes = [len(shape) + (end - start) * width, len(file_bytes), len(id_bytes)]
        values: list[bytes | memoryview] = [shape, tokens[start * width : end * width]]
        if weights is not None:
            sizes.insert(1, len(shape) + end - start)
            values += [shape, weights[start:end]]
        values += [file_bytes, position.to_bytes(8, "little", signed=True), id_bytes]
        samples.append(b"".join([b"".join(n.to_bytes(4, "little") for n in sizes), *values]))
    return samples


def _encode_shape(length: int) -> bytes:
    """Return MDS's header for a one-dimensional array: ndim, width of the shape, shape."""
    power = 0 if length < 1 << 8 else 1 if length < 1 << 16 else 2
    return bytes([1 << 2 | power]) + length.to_bytes(1 << power, "little")


def _read_head(read: Reader, size: int) -> tuple[Int64, dict[str, Any], int]:
    """Return sample offsets, config, and the config's end offset."""
    count = int.from_bytes(read(0, 4), "little")
    table_end = 4 + 4 * (count + 1)
    if table_end > size:
        raise IntegrityError("not a whole MDS file: its table of offsets is truncated")
    offsets = np.frombuffer(read(4, table_end), np.uint32).astype(np.int64)
    if offsets[-1] != size or np.any(np.diff(offsets) < 0):
        raise IntegrityError("not a whole MDS file: its last offset is not its size")
    config_text = read(table_end, int(offsets[0])).decode("latin-1")
    try:
        config, config_length = json.JSONDecoder().raw_decode(config_text)
    except ValueError:
        raise IntegrityError("not an MDS file: it has no config after its offsets") from None
    return offsets, config, table_end + config_length


def _read_first_value(url: str, entry: dict[str, Any], column: str) -> bytes:
    """Return a column's value in the first sample; empty if the shard has no sample."""
    uncompressed, compressed = entry["raw_data"], entry["zip_data"]
    if compressed is None:
        read: Reader = partial(storage.read, storage.join(url, uncompressed["basename"]))
    else:
        where = storage.join(url, compressed["basename"])
        read = partial(_slice, decompress(where, storage.read(where), uncompressed["bytes"]))
    offsets, config, _ = _read_head(read, uncompressed["bytes"])
    if len(offsets) < 2:
        return b""
    sample = read(int(offsets[0]), int(offsets[1]))
    return sample[slice(*column_ranges(sample, config)[column])]


def _slice(data: bytes, start: int, end: int) -> bytes:
    return data[start:end]


def _list_entries(url: str) -> list[dict[str, Any]]:
    """Return the shards in index.json; raise if the folder has MDS files that are not listed."""
    where = storage.join(url, "index.json")
    try:
        entries: list[dict[str, Any]] = json.loads(storage.read(where))["shards"]
        names = {entry["raw_data"]["basename"] for entry in entries}
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{where} is not a whole index of MDS shards: {error!r}", hint="restore it from a copy"
        ) from None
    folders = {file.rpartition("/")[0] for file in names}
    orphans = [
        file
        for file in storage.list_files(url)
        if (match := re.match(r"(?:(.*)/)?[^/]*\.mds(?=$|\.)", file))
        and (match[1] or "") in folders
        and match[0] not in names
    ]
    if orphans:
        raise InputError(
            f"{where} does not list {len(orphans)} MDS files beside it: {', '.join(orphans[:5])}",
            hint="restore index.json, or move these files out of the folder",
        )
    return entries


FORMAT = MdsFormat()
