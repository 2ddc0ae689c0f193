"""Arrow IPC files in large record batches: pyarrow, polars and `datasets` open them as they are.

    tokens: list<uint16 | uint32>    weights: list<uint8> (if any)
    file: string    position: int64    id: string (null where the corpus has none)

The tokens of one record batch are contiguous, so a batch is one run. Their offsets are read from
the metadata alone: the footer, then each batch's header and list offsets. (pyarrow does not expose
the offset of a buffer in its file, hence the flatbuffers reader at the end.)

Files of other programs are read as well: the column may have any name (`details["column"]`), and
may hold plain integers with one record batch per document, as in fms-fsdp's files.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

from ...console.errors import InputError, IntegrityError
from ..arrays import Int64
from ..storage import storage
from ..storage.faults import located
from .documents import DocumentOrigin, ShardDocuments
from .format import ExternalShard, Reader, ShardFormat, ShardLayout

BATCH_BYTES = 64 << 20
"""Bytes of tokens after which a record batch is closed: few batches, each far below the limit of
2^31 elements of list offsets."""

ENDINGS = (".arrow", ".feather")
MAGIC, STREAM = b"ARROW1", b"\xff\xff\xff\xff"
TAIL = 4 << 10

Block = tuple[int, int, int]
"""A record batch in its file: its offset, the bytes of its header, and those of its body."""


class ArrowFormat(ShardFormat):
    """Arrow IPC files."""

    external_files = ".arrow or .feather files"
    index_options = ("column",)

    def write(self, out: BinaryIO, documents: ShardDocuments) -> None:
        schema = _schema(documents)
        with pa.ipc.new_file(out, schema) as writer:
            for first, last in _batches(documents):
                part = documents[first:last]
                offsets = pa.array(part.starts.astype(np.int32))
                columns = [pa.ListArray.from_arrays(offsets, pa.array(part.tokens))]
                if part.weights is not None:
                    columns.append(pa.ListArray.from_arrays(offsets, pa.array(part.weights)))
                names = pa.DictionaryArray.from_arrays(
                    pa.array(part.file), pa.array(part.files, pa.string())
                )
                columns += [names.cast(pa.string()), pa.array(part.position)]
                ids = part.ids if part.ids is not None else (None,) * len(part)
                columns.append(pa.array(ids, pa.string()))
                writer.write_batch(pa.record_batch(columns, schema=schema))

    def layout(
        self, read: Reader, size: int, *, dtype: str, details: dict[str, object]
    ) -> ShardLayout:
        file = _File(read, size)
        name = str(details.get("column", "tokens"))
        tokens, nested = file.column(name)
        has_weights = nested and "weights" in file.schema.names
        starts: list[Int64] = [np.zeros(1, np.int64)]
        run_tokens, run_bytes, weight_bytes = [0], [], []
        for block in file.blocks:
            buffers, rows = file.buffers(block)
            if nested:
                offsets = file.offsets(buffers[tokens + 1], rows, file.schema.field(name).type)
                base = int(offsets[0])
                ends = offsets[1:] - base
                values = buffers[tokens + 3][0] + base * np.dtype(dtype).itemsize
            else:
                ends = np.array([rows], np.int64)
                values = buffers[tokens + 1][0]
                base = 0
            file.check_no_nulls(
                name, buffers[tokens + 2 * nested], base, base + int(ends[-1:].sum())
            )
            starts.append(ends + run_tokens[-1])
            run_bytes.append(values)
            if has_weights:
                weight_bytes.append(buffers[file.column("weights")[0] + 3][0] + base)
            run_tokens.append(int(starts[-1][-1]) if len(ends) else run_tokens[-1])
        return ShardLayout(
            document_starts=np.concatenate(starts),
            run_tokens=np.array(run_tokens, np.int64),
            run_bytes=np.array(run_bytes, np.int64),
            weight_bytes=np.array(weight_bytes, np.int64) if has_weights else None,
        )

    def origins(
        self, read: Reader, size: int, first: int, last: int, *, details: dict[str, object]
    ) -> list[DocumentOrigin]:
        file = _File(read, size)
        nested = file.column(str(details.get("column", "tokens")))[1]
        names = [name for name in ("file", "position", "id") if name in file.schema.names]
        origins: list[DocumentOrigin] = []
        seen = 0
        for number, block in enumerate(file.blocks):
            buffers, rows = file.buffers(block)
            rows = rows if nested else 1
            low, high = max(first, seen) - seen, min(last, seen + rows) - seen
            seen += rows
            if low >= high:
                continue
            if not nested or len(names) < 3:
                name = str(details.get("file", ""))
                origins += [
                    DocumentOrigin(file=name, position=seen - rows + k) for k in range(low, high)
                ]
                continue
            columns = {name: file.values(name, number, buffers, low, high) for name in names}
            origins += [
                DocumentOrigin(str(name), int(position), None if id is None else str(id))
                for name, position, id in zip(
                    columns["file"], columns["position"], columns["id"], strict=True
                )
            ]
        return origins

    def recognises(self, names: Sequence[str]) -> bool:
        return any(name.endswith(ENDINGS) for name in names)

    def external_shards(self, url: str, column: str, dtype: str | None) -> Iterator[ExternalShard]:
        for name in storage.list_files(url):
            if not name.endswith(ENDINGS):
                continue
            where = storage.join(url, name)
            size = storage.size(where)
            with located(where):
                kind = id_type(partial(storage.read, where), size, column)
            yield ExternalShard(
                name=name, size=size, dtype=kind, details={"column": column, "file": name}
            )


def id_type(read: Reader, size: int, column: str) -> str:
    """Return the type of the ids in a file of another program."""
    file = _File(read, size)
    nested = file.column(column)[1]
    kind = file.schema.field(column).type
    kind = kind.value_type if nested else kind
    if not pa.types.is_integer(kind):
        raise InputError(f"the column `{column}` holds {kind}, not integers")
    return str(np.dtype(kind.to_pandas_dtype()).name)


def batch_rows(read: Reader, size: int) -> list[int]:
    """Return the rows of each record batch of an Arrow file, reading only the headers."""
    return [_rows(_batch(read, block)) for block in _blocks(read, size)[0]]


def _schema(documents: ShardDocuments) -> Any:
    fields = [("tokens", pa.list_(pa.from_numpy_dtype(documents.tokens.dtype)))]
    if documents.weights is not None:
        fields.append(("weights", pa.list_(pa.uint8())))
    return pa.schema(
        [*fields, ("file", pa.string()), ("position", pa.int64()), ("id", pa.string())]
    )


def _batches(documents: ShardDocuments) -> list[tuple[int, int]]:
    """Split documents into record batches of about BATCH_BYTES of tokens."""
    room = BATCH_BYTES // documents.tokens.itemsize
    cuts, first = [], 0
    while first < len(documents):
        last = int(np.searchsorted(documents.starts, documents.starts[first] + room, side="right"))
        last = min(max(last - 1, first + 1), len(documents))
        cuts.append((first, last))
        first = last
    return cuts


class _File:
    """The metadata of an Arrow file: schema, record batches, and offsets of their buffers."""

    def __init__(self, read: Reader, size: int) -> None:
        self.read = read
        self.blocks, footer = _blocks(read, size)
        end = self.blocks[0][0] if self.blocks else footer
        self.schema = pa.ipc.read_schema(pa.py_buffer(read(8, end)))
        self._index: dict[str, int] = {}
        at = 0
        for field in self.schema:
            self._index[field.name] = at
            at += _buffer_count(field.type)

    def column(self, name: str) -> tuple[int, bool]:
        """Return the index of a column's first buffer, and True if its rows are lists."""
        if name not in self._index:
            known = ", ".join(self.schema.names)
            raise InputError(f"the Arrow file has no column `{name}`", hint=f"its columns: {known}")
        kind = self.schema.field(name).type
        return self._index[name], pa.types.is_list(kind) or pa.types.is_large_list(kind)

    def buffers(self, block: Block) -> tuple[list[tuple[int, int]], int]:
        """Return (offset, bytes) of each buffer of a record batch in the file, and its rows."""
        offset, head, _ = block
        batch = _batch(self.read, block)
        if batch.field(3):
            raise InputError(
                "the Arrow file's buffers are compressed: tokens cannot be read in place",
                hint="write the file without compression",
            )
        places = [struct.unpack_from("<qq", batch.data, at) for at in batch.vector(2, stride=16)]
        return [(offset + head + at, length) for at, length in places], _rows(batch)

    def offsets(self, buffer: tuple[int, int], rows: int, kind: Any) -> Int64:
        """Return the rows + 1 offsets of a list or string column."""
        wide = any(test(kind) for test in (pa.types.is_large_list, pa.types.is_large_string))
        dtype = np.dtype("<i8" if wide else "<i4")
        if rows == 0:
            return np.zeros(1, np.int64)
        data = self.read(buffer[0], buffer[0] + (rows + 1) * dtype.itemsize)
        return np.frombuffer(data, dtype).astype(np.int64)

    def check_no_nulls(self, name: str, validity: tuple[int, int], first: int, last: int) -> None:
        """Raise if an id is null: the buffer may hold any number there."""
        start, length = validity
        if length:
            bits = np.frombuffer(self.read(start, start + length), np.uint8)
            if not np.unpackbits(bits, bitorder="little")[first:last].all():
                raise InputError(f"the column `{name}` has nulls among its ids")

    def values(
        self, name: str, number: int, buffers: list[tuple[int, int]], low: int, high: int
    ) -> list[Any]:
        """Return the rows [low, high) of a string or int64 column, reading only those rows."""
        at = self._index[name]
        kind = self.schema.field(name).type
        _, rows = self.buffers(self.blocks[number])
        if pa.types.is_int64(kind):
            start = buffers[at + 1][0]
            places = np.frombuffer(self.read(start + 8 * low, start + 8 * high), "<i8")
            return list(places.tolist())
        offsets = self.offsets(buffers[at + 1], rows, kind)[low : high + 1]
        start = buffers[at + 2][0]
        text = self.read(start + int(offsets[0]), start + int(offsets[-1]))
        present = [True] * (high - low)
        if buffers[at][1]:
            bits = np.frombuffer(self.read(buffers[at][0], sum(buffers[at])), np.uint8)
            present = np.unpackbits(bits, bitorder="little")[low:high].astype(bool).tolist()
        cuts = (offsets - offsets[0]).tolist()
        return [
            text[a:b].decode() if there else None
            for a, b, there in zip(cuts[:-1], cuts[1:], present, strict=True)
        ]


def _blocks(read: Reader, size: int) -> tuple[list[Block], int]:
    """Return the record batches of a file, and the offset of its footer."""
    tail = read(max(0, size - TAIL), size)
    if read(0, min(4, size)) == STREAM:
        raise InputError(
            "an Arrow IPC stream, which does not record the offsets of its batches",
            hint="write it again as an Arrow IPC file (pyarrow.ipc.new_file)",
        )
    if len(tail) < 10 or not tail.endswith(MAGIC):
        raise IntegrityError("not a whole Arrow IPC file: its last bytes are missing")
    length = struct.unpack_from("<i", tail, len(tail) - 10)[0]
    footer = tail[-10 - length : -10]
    if length + 10 > len(tail):
        footer = read(size - 10 - length, size - 10)
    root = _Table(footer, struct.unpack_from("<I", footer)[0])
    blocks = [struct.unpack_from("<qi4xq", footer, at) for at in root.vector(3, stride=24)]
    return blocks, size - 10 - length


def _batch(read: Reader, block: Block) -> _Table:
    """Read the header of a record batch."""
    offset, head, _ = block
    data = read(offset, offset + head)
    start = 8 if data[:4] == b"\xff\xff\xff\xff" else 4
    return _Table(data, start + struct.unpack_from("<I", data, start)[0]).table(2)


def _rows(batch: _Table) -> int:
    at = batch.field(0)
    return int(struct.unpack_from("<q", batch.data, at)[0]) if at else 0


def _buffer_count(kind: Any) -> int:
    """Return the number of buffers of a column of this type, children included."""
    types = pa.types
    if types.is_null(kind):
        return 0
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        return 2 + sum(_buffer_count(kind.field(k).type) for k in range(kind.num_fields))
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        return 1 + sum(_buffer_count(kind.field(k).type) for k in range(kind.num_fields))
    if any(
        test(kind)
        for test in (types.is_string, types.is_large_string, types.is_binary, types.is_large_binary)
    ):
        return 3
    if types.is_primitive(kind) or types.is_dictionary(kind) or types.is_fixed_size_binary(kind):
        return 2
    raise InputError(f"the Arrow file has a column of type {kind}, which cannot be indexed")


class _Table:
    """A flatbuffers table: its vtable holds the offset of each numbered field."""

    def __init__(self, data: bytes, position: int) -> None:
        self.data = data
        self.position = position
        self.vtable = position - struct.unpack_from("<i", data, position)[0]
        self.size = struct.unpack_from("<H", data, self.vtable)[0]

    def field(self, number: int) -> int:
        """Return the offset of field `number`, or 0 if it is absent."""
        slot = 4 + 2 * number
        if slot >= self.size:
            return 0
        offset = int(struct.unpack_from("<H", self.data, self.vtable + slot)[0])
        return self.position + offset if offset else 0

    def table(self, number: int) -> _Table:
        at = self.field(number)
        return _Table(self.data, at + struct.unpack_from("<I", self.data, at)[0])

    def vector(self, number: int, *, stride: int) -> list[int]:
        """Return the offsets of the elements of a vector of structs."""
        at = self.field(number)
        if not at:
            return []
        start = at + struct.unpack_from("<I", self.data, at)[0]
        count = struct.unpack_from("<I", self.data, start)[0]
        return [start + 4 + stride * k for k in range(count)]


FORMAT = ArrowFormat()
