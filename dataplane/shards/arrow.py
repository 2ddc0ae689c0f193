"""Arrow IPC files in large record batches: pyarrow, polars and `datasets` open them as they are.

    tokens: list<uint16 | uint32>    weights: list<uint8> (if any)
    file: string    position: int64    id: string (null where the corpus has none)

The tokens of one record batch are contiguous, so a batch is one run. Their offsets are read from
the metadata alone (arrow_ipc.py).

Files of other programs are read as well: IPC files and streams. The column may have any name
(`details["column"]`) and any type of list, or hold plain integers with one record batch per
document, as in fms-fsdp's files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from ...console.errors import InputError, IntegrityError
from ..arrays import Int64, arrow_column, arrow_numbers
from ..storage import storage
from ..storage.faults import add_location
from .arrow_flat import flat_layout, is_flat
from .arrow_ipc import ORIGINS, IpcFile
from .compression import ARROW_ENDINGS
from .documents import DocumentOrigin, ShardDocuments
from .format import ExternalShard, Reader, ShardFormat, ShardLayout

BATCH_BYTES = 64 << 20
"""Bytes of tokens after which a record batch is closed: few batches, each far below the limit of
2^31 elements of list offsets."""

NONE = np.zeros(0, np.int64)
SAVED, SPLITS = "state.json", "dataset_dict.json"
"""Files of `save_to_disk` of `datasets`: the list of a dataset's files, and the list of splits."""


class ArrowFormat(ShardFormat):
    """Arrow IPC files."""

    external_files = ".arrow or .feather files"
    index_options = ("column",)

    def __init__(self, batch_bytes: int = BATCH_BYTES) -> None:
        """Record batches hold about `batch_bytes` of tokens."""
        self.batch_bytes = batch_bytes

    def write(self, out: BinaryIO, documents: ShardDocuments) -> None:
        schema = _schema(documents)
        with pa.ipc.new_file(out, schema) as writer:
            for first, last in _batches(documents, self.batch_bytes):
                part = documents[first:last]
                offsets = arrow_numbers(part.starts.astype(np.int32))
                columns = [pa.ListArray.from_arrays(offsets, arrow_numbers(part.tokens))]
                if part.weights is not None:
                    columns.append(pa.ListArray.from_arrays(offsets, arrow_numbers(part.weights)))
                files = [part.files[number] for number in part.file.tolist()]
                ids = part.ids if part.ids is not None else (None,) * len(part)
                columns += [
                    arrow_column(files, pa.string()),
                    arrow_numbers(part.position),
                    arrow_column(ids, pa.string()),
                ]
                writer.write_batch(pa.record_batch(columns, schema=schema))

    def layout(
        self, read: Reader, size: int, *, dtype: str, details: dict[str, object]
    ) -> ShardLayout:
        if is_flat(read, size):
            return flat_layout(read)
        file = IpcFile(read, size)
        name = str(details.get("column", "tokens"))
        file.check_column(name)
        has_weights = file.nested(name) and "weights" in file.schema.names
        width = np.dtype(dtype).itemsize
        starts: list[Int64] = [np.zeros(1, np.int64)]
        run_tokens = [np.zeros(1, np.int64)]
        run_bytes, weight_bytes = [NONE], [NONE]
        before = 0
        for block in file.blocks:
            batch = file.batch(block)
            first, lengths, values = file.documents(batch, name)
            ends = before + np.cumsum(lengths)
            starts.append(ends)
            # A run ends where the next document does not follow the one before it.
            cuts = np.flatnonzero(first[1:] != first[:-1] + lengths[:-1]) + 1
            heads = np.concatenate([[0], cuts]) if len(lengths) else cuts
            run_bytes.append(values + first[heads] * width)
            if has_weights:
                weights = file.documents(batch, "weights")
                weight_bytes.append(weights[2] + weights[0][heads])
            run_tokens.append(ends[np.concatenate([heads[1:] - 1, [-1]])] if len(heads) else ends)
            before = int(ends[-1]) if len(ends) else before
        return ShardLayout(
            document_starts=np.concatenate(starts),
            run_tokens=np.concatenate(run_tokens),
            run_bytes=np.concatenate(run_bytes),
            weight_bytes=np.concatenate(weight_bytes) if has_weights else None,
        )

    def origins(
        self, read: Reader, size: int, first: int, last: int, *, details: dict[str, object]
    ) -> list[DocumentOrigin]:
        if is_flat(read, size):
            name = str(details["file"])
            return [DocumentOrigin(name, number) for number in range(first, last)]
        file = IpcFile(read, size)
        nested = file.nested(str(details.get("column", "tokens")))
        origins: list[DocumentOrigin] = []
        seen = 0
        for block in file.blocks:
            batch = file.batch(block)
            rows = batch.rows if nested else 1
            low, high = max(first, seen) - seen, min(last, seen + rows) - seen
            seen += rows
            if low >= high:
                continue
            if not file.has_origins:
                name = str(details.get("file", ""))
                origins += [
                    DocumentOrigin(file=name, position=seen - rows + k) for k in range(low, high)
                ]
                continue
            columns = {name: file.values(name, batch, low, high) for name in ORIGINS}
            origins += [
                DocumentOrigin(str(name), int(position), None if id is None else str(id))
                for name, position, id in zip(
                    columns["file"], columns["position"], columns["id"], strict=True
                )
            ]
        return origins

    def recognises(self, names: Sequence[str]) -> bool:
        return any(name.endswith(ARROW_ENDINGS) for name in names)

    def external_shards(self, url: str, column: str, dtype: str | None) -> Iterator[ExternalShard]:
        for name in _data_files(url):
            where = storage.join(url, name)
            size = storage.size(where)
            with add_location(where):
                file = IpcFile(partial(storage.read, where), size)
                kind = id_type(file, column)
            packed = file.compressed
            yield ExternalShard(
                name=name,
                size=size,
                dtype=kind,
                details={"column": column, "file": name},
                stored_name=name if packed else None,
                stored_size=size if packed else None,
            )


def id_type(file: IpcFile, column: str) -> str:
    """Return the type of the ids in a file of another program."""
    file.check_column(column)
    kind = file.schema.field(column).type
    kind = kind.value_type if file.nested(column) else kind
    if not pa.types.is_integer(kind):
        raise InputError(f"the column `{column}` holds {kind}, not integers")
    return str(np.dtype(kind.to_pandas_dtype()).name)


def _data_files(url: str) -> list[str]:
    """Return the names of the files of a dataset: those that `save_to_disk` lists, or all."""
    names = storage.list_files(url)
    if SPLITS in names:
        raise InputError(
            f"{url} holds the splits of a dataset, not one dataset",
            hint="name the folder of a split: "
            + ", ".join(sorted({name.split("/")[0] for name in names if "/" in name})),
        )
    if SAVED not in names:
        return [name for name in names if name.endswith(ARROW_ENDINGS)]
    where = storage.join(url, SAVED)
    try:
        return [entry["filename"] for entry in json.loads(storage.read(where))["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{where} does not list the files of its dataset: {error!r}",
            hint="restore it from a copy",
        ) from None


def _schema(documents: ShardDocuments) -> Any:
    fields = [("tokens", pa.list_(pa.from_numpy_dtype(documents.tokens.dtype)))]
    if documents.weights is not None:
        fields.append(("weights", pa.list_(pa.uint8())))
    return pa.schema([*fields, *ORIGINS.items()])


def _batches(documents: ShardDocuments, size: int) -> list[tuple[int, int]]:
    """Split documents into record batches of about `size` bytes of tokens."""
    room = size // documents.tokens.itemsize
    cuts, first = [], 0
    while first < len(documents):
        last = int(np.searchsorted(documents.starts, documents.starts[first] + room, side="right"))
        last = min(max(last - 1, first + 1), len(documents))
        cuts.append((first, last))
        first = last
    return cuts


FORMAT = ArrowFormat()
