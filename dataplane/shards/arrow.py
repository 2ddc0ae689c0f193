"""Arrow IPC files in large record batches: pyarrow, polars and `datasets` open them as they are.

A row is a document:

    tokens: list<uint16 | uint32>    weights: list<uint8> (if any)
    file: string    position: int64    id: string (null where the corpus has none)

Tokens in a record batch are contiguous, so a batch is a run, located from metadata alone
(arrow_ipc.py).

Files by other programs are read as well: IPC files and streams. The column may have any name
(`details["column"]`). It holds lists of any type, a document per row; or plain integers, a document
per record batch, as in fms-fsdp's files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from ...console.errors import InputError, IntegrityError
from ..arrays import Int64, arrow_column, arrow_null_texts, arrow_numbers, arrow_texts
from ..storage import storage
from ..storage.faults import add_location
from .arrow_flat import flat_layout, is_flat
from .arrow_ipc import ORIGIN_COLUMNS, IpcFile
from .compression import ARROW_ENDINGS
from .documents import DocumentOrigin, ShardDocuments
from .format import ExternalShard, Reader, ShardFormat, ShardLayout

BATCH_BYTES = 64 << 20
"""Token bytes per record batch: few batches, all far below the limit of 2^31 list elements."""

NO_OFFSETS = np.zeros(0, np.int64)
STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
"""Files that `save_to_disk` of `datasets` writes: the list of data files, and that of splits."""


class ArrowFormat(ShardFormat):
    """Arrow IPC files."""

    external_files = ".arrow or .feather files"
    index_options = ("column",)

    def __init__(self, batch_bytes: int = BATCH_BYTES) -> None:
        """`batch_bytes`: token bytes per record batch, at most; but a document is never split."""
        self.batch_bytes = batch_bytes

    def write(self, out: BinaryIO, documents: ShardDocuments) -> None:
        schema = _build_schema(documents)
        with pa.ipc.new_file(out, schema) as writer:
            for first, end in _split_batches(documents, self.batch_bytes):
                batch = documents[first:end]
                offsets = arrow_numbers(batch.starts.astype(np.int32))
                columns = [pa.ListArray.from_arrays(offsets, arrow_numbers(batch.tokens))]
                if batch.weights is not None:
                    columns.append(pa.ListArray.from_arrays(offsets, arrow_numbers(batch.weights)))
                columns += [
                    arrow_texts(batch.files, batch.file),
                    arrow_numbers(batch.position),
                    arrow_null_texts(len(batch))
                    if batch.ids is None
                    else arrow_column(batch.ids, pa.string()),
                ]
                writer.write_batch(pa.record_batch(columns, schema=schema))

    def layout(
        self, read: Reader, size: int, *, dtype: str, details: dict[str, object]
    ) -> ShardLayout:
        if is_flat(read, size):
            return flat_layout(read)
        file = IpcFile(read, size)
        column = str(details.get("column", "tokens"))
        file.check_column(column)
        has_weights = file.is_nested(column) and "weights" in file.schema.names
        width = np.dtype(dtype).itemsize
        document_starts: list[Int64] = [np.zeros(1, np.int64)]
        run_tokens = [np.zeros(1, np.int64)]
        run_bytes, weight_bytes = [NO_OFFSETS], [NO_OFFSETS]
        num_tokens = 0
        for block in file.blocks:
            batch = file.batch(block)
            first_values, lengths, values_byte = file.locate_values(batch, column)
            document_ends = num_tokens + np.cumsum(lengths)
            num_tokens += int(lengths.sum())
            document_starts.append(document_ends)
            first_documents = _split_runs(first_values, lengths)
            end_documents = np.append(first_documents, len(lengths))[1:]
            run_tokens.append(document_ends[end_documents - 1])
            run_bytes.append(values_byte + first_values[first_documents] * width)
            if has_weights:
                first_codes, _, codes_byte = file.locate_values(batch, "weights")
                weight_bytes.append(codes_byte + first_codes[first_documents])
        return ShardLayout(
            document_starts=np.concatenate(document_starts),
            run_tokens=np.concatenate(run_tokens),
            run_bytes=np.concatenate(run_bytes),
            weight_bytes=np.concatenate(weight_bytes) if has_weights else None,
        )

    def origins(
        self, read: Reader, size: int, first: int, end: int, *, details: dict[str, object]
    ) -> list[DocumentOrigin]:
        if is_flat(read, size):
            file_name = str(details["file"])
            return [DocumentOrigin(file_name, number) for number in range(first, end)]
        file = IpcFile(read, size)
        is_nested = file.is_nested(str(details.get("column", "tokens")))
        origins: list[DocumentOrigin] = []
        end_document = 0
        for block in file.blocks:
            batch = file.batch(block)
            first_document = end_document
            end_document += batch.rows if is_nested else 1
            low, high = max(first, first_document), min(end, end_document)
            if low >= high:
                continue
            if not file.has_origins:
                file_name = str(details.get("file", ""))
                origins += [DocumentOrigin(file_name, number) for number in range(low, high)]
                continue
            columns = (
                file.read_origins(column, batch, low - first_document, high - first_document)
                for column in ORIGIN_COLUMNS
            )
            origins += [
                DocumentOrigin(str(name), int(position), None if id is None else str(id))
                for name, position, id in zip(*columns, strict=True)
            ]
        return origins

    def recognises(self, names: Sequence[str]) -> bool:
        return any(name.endswith(ARROW_ENDINGS) for name in names)

    def external_shards(self, url: str, column: str, dtype: str | None) -> Iterator[ExternalShard]:
        for name in _list_data_files(url):
            where = storage.join(url, name)
            size = storage.size(where)
            with add_location(where):
                file = IpcFile(partial(storage.read, where), size)
                id_type = _read_id_type(file, column)
            is_compressed = file.compressed
            yield ExternalShard(
                name=name,
                size=size,
                dtype=id_type,
                details={"column": column, "file": name},
                stored_name=name if is_compressed else None,
                stored_size=size if is_compressed else None,
            )


def _split_runs(first_values: Int64, lengths: Int64) -> Int64:
    """Return [runs] each run's first document. A run ends where the next document's values are not
    adjacent. Both arguments are [documents]."""
    if not len(lengths):
        return NO_OFFSETS
    is_cut = first_values[1:] != first_values[:-1] + lengths[:-1]
    return np.append(0, np.flatnonzero(is_cut) + 1)


def _read_id_type(file: IpcFile, column: str) -> str:
    """Return numpy's name of a column's id type. Raise InputError for a column without integers."""
    file.check_column(column)
    arrow_type = file.schema.field(column).type
    arrow_type = arrow_type.value_type if file.is_nested(column) else arrow_type
    if not pa.types.is_integer(arrow_type):
        raise InputError(f"the column `{column}` holds {arrow_type}, not integers")
    return str(np.dtype(arrow_type.to_pandas_dtype()).name)


def _list_data_files(url: str) -> list[str]:
    """List a dataset's data files: those that `save_to_disk` listed, or else all Arrow files."""
    names = storage.list_files(url)
    if SPLITS_FILE in names:
        raise InputError(
            f"{url} holds the splits of a dataset, not one dataset",
            hint="name the folder of a split: "
            + ", ".join(sorted({name.split("/")[0] for name in names if "/" in name})),
        )
    if STATE_FILE not in names:
        return [name for name in names if name.endswith(ARROW_ENDINGS)]
    where = storage.join(url, STATE_FILE)
    try:
        return [entry["filename"] for entry in json.loads(storage.read(where))["_data_files"]]
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError(
            f"{where} does not list the files of its dataset: {error!r}",
            hint="restore it from a copy",
        ) from None


def _build_schema(documents: ShardDocuments) -> Any:
    fields = [("tokens", pa.list_(pa.from_numpy_dtype(documents.tokens.dtype)))]
    if documents.weights is not None:
        fields.append(("weights", pa.list_(pa.uint8())))
    return pa.schema([*fields, *ORIGIN_COLUMNS.items()])


def _split_batches(documents: ShardDocuments, batch_bytes: int) -> list[tuple[int, int]]:
    """Split documents into record batches [first, end) of at most `batch_bytes` token bytes; a
    longer document is a batch by itself."""
    max_tokens = batch_bytes // documents.tokens.itemsize
    batches, first = [], 0
    while first < len(documents):
        end = int(
            np.searchsorted(documents.starts, documents.starts[first] + max_tokens, side="right")
        )
        end = min(max(end - 1, first + 1), len(documents))
        batches.append((first, end))
        first = end
    return batches


FORMAT = ArrowFormat()
