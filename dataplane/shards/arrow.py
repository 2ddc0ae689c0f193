"""Arrow IPC files in large record batches: pyarrow, polars and `datasets` open them as they are.

    tokens: list<uint16 | uint32>    weights: list<uint8> (if any)
    file: string    position: int64    id: string (null where the corpus has none)

Tokens in a record batch are contiguous, so a batch is a run, located from metadata alone
(arrow_ipc.py).

Files by other programs are read as well: IPC files and streams. The column may have any name
(`details["column"]`) and any list type, or hold plain integers with a record batch per document, as
in fms-fsdp's files.
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
from .arrow_ipc import ORIGIN_COLUMNS, IpcFile
from .compression import ARROW_ENDINGS
from .documents import DocumentOrigin, ShardDocuments
from .format import ExternalShard, Reader, ShardFormat, ShardLayout

BATCH_BYTES = 64 << 20
"""Token bytes per record batch: few batches, all far below the limit of 2^31 list elements."""

NO_OFFSETS = np.zeros(0, np.int64)
STATE_FILE, SPLITS_FILE = "state.json", "dataset_dict.json"
"""Files by `save_to_disk` in `datasets`: the list of data files, and the list of splits."""


class ArrowFormat(ShardFormat):
    """Arrow IPC files."""

    external_files = ".arrow or .feather files"
    index_options = ("column",)

    def __init__(self, batch_bytes: int = BATCH_BYTES) -> None:
        """Record batches hold about `batch_bytes` of token data."""
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
                files = [batch.files[number] for number in batch.file.tolist()]
                ids = batch.ids if batch.ids is not None else (None,) * len(batch)
                columns += [
                    arrow_column(files, pa.string()),
                    arrow_numbers(batch.position),
                    arrow_column(ids, pa.string()),
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
        end_token = 0
        for block in file.blocks:
            batch = file.batch(block)
            first_values, lengths, values_byte = file.locate_values(batch, column)
            ends = end_token + np.cumsum(lengths)
            document_starts.append(ends)
            # A run ends where the next document is not adjacent.
            cuts = np.flatnonzero(first_values[1:] != first_values[:-1] + lengths[:-1]) + 1
            run_starts = np.concatenate([[0], cuts]) if len(lengths) else cuts
            run_bytes.append(values_byte + first_values[run_starts] * width)
            if has_weights:
                weights = file.locate_values(batch, "weights")
                weight_bytes.append(weights[2] + weights[0][run_starts])
            last_documents = [*(run_starts[1:] - 1), -1] if len(run_starts) else []
            run_tokens.append(ends[np.array(last_documents, np.int64)])
            end_token = int(ends[-1]) if len(ends) else end_token
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
            name = str(details["file"])
            return [DocumentOrigin(name, number) for number in range(first, end)]
        file = IpcFile(read, size)
        nested = file.is_nested(str(details.get("column", "tokens")))
        origins: list[DocumentOrigin] = []
        end_row = 0
        for block in file.blocks:
            batch = file.batch(block)
            first_row, end_row = end_row, end_row + (batch.rows if nested else 1)
            start, stop = max(first, first_row), min(end, end_row)
            if start >= stop:
                continue
            if not file.has_origins:
                name = str(details.get("file", ""))
                origins += [DocumentOrigin(name, number) for number in range(start, stop)]
                continue
            columns = (
                file.read_origins(name, batch, start - first_row, stop - first_row)
                for name in ORIGIN_COLUMNS
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
                id_type = column_id_type(file, column)
            compressed = file.compressed
            yield ExternalShard(
                name=name,
                size=size,
                dtype=id_type,
                details={"column": column, "file": name},
                stored_name=name if compressed else None,
                stored_size=size if compressed else None,
            )


def column_id_type(file: IpcFile, column: str) -> str:
    """Return the id type in a file by another program."""
    file.check_column(column)
    arrow_type = file.schema.field(column).type
    arrow_type = arrow_type.value_type if file.is_nested(column) else arrow_type
    if not pa.types.is_integer(arrow_type):
        raise InputError(f"the column `{column}` holds {arrow_type}, not integers")
    return str(np.dtype(arrow_type.to_pandas_dtype()).name)


def _list_data_files(url: str) -> list[str]:
    """List a dataset's files: those named by `save_to_disk`, or else all."""
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


def _split_batches(documents: ShardDocuments, size: int) -> list[tuple[int, int]]:
    """Split documents into batches with about `size` token bytes."""
    max_tokens = size // documents.tokens.itemsize
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
