"""Metadata in Arrow IPC files and streams: where a column's buffers lie in the file.

Only metadata is read: a file's footer, or a stream's messages one after another; then batch headers
and list offsets. pyarrow does not expose buffer offsets, hence the flatbuffers reader at the end.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ...console.errors import InputError, IntegrityError
from ..arrays import Int64
from .format import Reader

MAGIC, STREAM_MARK = b"ARROW1", b"\xff\xff\xff\xff"
FOOTER_READ = 4 << 10
RECORD_BATCH_TYPE = 3
"""Type code in a message's header."""
ORIGIN_COLUMNS = {"file": pa.string(), "position": pa.int64(), "id": pa.string()}
"""Columns with document origins, in files written by headrace."""

BatchLocation = tuple[int, int, int]
"""A record batch in the file: offset, header bytes, body bytes."""


def batch_rows(read: Reader, size: int) -> list[int]:
    """Return row counts by record batch, reading only headers."""
    return [_row_count(_read_header(read, block)) for block in _locate_batches(read, size)[0]]


@dataclass(frozen=True)
class RecordBatch:
    """A record batch's metadata."""

    rows: int
    buffers: list[tuple[int, int]]
    """Offset in the file, and bytes."""
    first_buffers: dict[str, int]
    """Column → index of the first buffer."""


class IpcFile:
    """An Arrow file's metadata: schema, record batches, buffer offsets."""

    def __init__(self, read: Reader, size: int) -> None:
        self.read = read
        self.blocks, schema_start, schema_end = _locate_batches(read, size)
        self.schema = pa.ipc.read_schema(pa.py_buffer(read(schema_start, schema_end)))

    @property
    def has_origins(self) -> bool:
        """True if the file has the columns in ORIGIN_COLUMNS."""
        names = self.schema.names
        return all(
            names.count(name) == 1 and self.schema.field(name).type == kind
            for name, kind in ORIGIN_COLUMNS.items()
        )

    @property
    def compressed(self) -> bool:
        """True if any batch has compressed buffers."""
        return any(_read_header(self.read, block).field(3) for block in self.blocks)

    def check_column(self, name: str) -> None:
        """Raise if the column is missing or not unique."""
        if (count := self.schema.names.count(name)) != 1:
            matches = f"{count} columns" if count else "no column"
            raise InputError(
                f"the Arrow file has {matches} `{name}`",
                hint=f"its columns: {', '.join(self.schema.names)}",
            )

    def is_nested(self, name: str) -> bool:
        """Return True if a column's rows are lists."""
        return is_list(self.schema.field(name).type)

    def batch(self, block: BatchLocation) -> RecordBatch:
        """Read a record batch's header."""
        offset, head, _ = block
        batch = _read_header(self.read, block)
        assert not batch.field(3), "files with compressed buffers are read in their flat form"
        ranges = [
            struct.unpack_from("<qq", batch.data, entry) for entry in batch.vector(2, stride=16)
        ]
        view_counts = [
            struct.unpack_from("<q", batch.data, entry)[0] for entry in batch.vector(4, stride=8)
        ]
        first_buffers, next_buffer = {}, 0
        for field in self.schema:
            first_buffers[field.name] = next_buffer
            next_buffer += _buffer_count(field.type, view_counts)
        return RecordBatch(
            _row_count(batch),
            [(offset + head + start, length) for start, length in ranges],
            first_buffers,
        )

    def locate_values(self, batch: RecordBatch, name: str) -> tuple[Int64, Int64, int]:
        """Locate a batch's documents: first value and length per document [documents], and the
        column values' offset in the file."""
        buffer = batch.first_buffers[name]
        arrow_type = self.schema.field(name).type
        types = pa.types
        if not is_list(arrow_type):  # the batch is a document
            first_values, lengths = np.zeros(1, np.int64), np.array([batch.rows], np.int64)
            validity, values = buffer, buffer + 1
        elif types.is_fixed_size_list(arrow_type):
            first_values = np.arange(batch.rows, dtype=np.int64) * arrow_type.list_size
            lengths = np.full(batch.rows, arrow_type.list_size, np.int64)
            validity, values = buffer + 1, buffer + 2
        elif types.is_list_view(arrow_type) or types.is_large_list_view(arrow_type):
            wide = types.is_large_list_view(arrow_type)
            first_values = self._numbers(batch.buffers[buffer + 1], batch.rows, wide=wide)
            lengths = self._numbers(batch.buffers[buffer + 2], batch.rows, wide=wide)
            validity, values = buffer + 3, buffer + 4
        else:
            wide = types.is_large_list(arrow_type)
            offsets = self._numbers(batch.buffers[buffer + 1], batch.rows + 1, wide=wide)
            first_values, lengths = offsets[:-1], np.diff(offsets)
            validity, values = buffer + 2, buffer + 3
        first_value = int(first_values.min()) if len(first_values) else 0
        end_value = int((first_values + lengths).max()) if len(first_values) else 0
        if is_list(arrow_type) and batch.buffers[buffer][1]:
            self._check_no_nulls(name, batch.buffers[buffer], 0, batch.rows)
        self._check_no_nulls(name, batch.buffers[validity], first_value, end_value)
        return first_values, lengths, batch.buffers[values][0]

    def _numbers(self, buffer: tuple[int, int], count: int, *, wide: bool) -> Int64:
        """Read `count` list offsets or sizes from a buffer."""
        if not buffer[1]:
            return np.zeros(count, np.int64)  # a batch without rows
        dtype = np.dtype("<i8" if wide else "<i4")
        data = self.read(buffer[0], buffer[0] + count * dtype.itemsize)
        return np.frombuffer(data, dtype).astype(np.int64)

    def _check_no_nulls(self, name: str, validity: tuple[int, int], first: int, end: int) -> None:
        """Raise if a value is null: the buffer may hold any number there."""
        start, length = validity
        if length:
            bits = np.frombuffer(self.read(start, start + length), np.uint8)
            if not np.unpackbits(bits, bitorder="little")[first:end].all():
                raise InputError(f"the column `{name}` has nulls among its ids")

    def read_origins(self, name: str, batch: RecordBatch, first: int, end: int) -> list[Any]:
        """Read the rows [first, end) from a column in ORIGIN_COLUMNS, and no others."""
        buffer, buffers = batch.first_buffers[name], batch.buffers
        if ORIGIN_COLUMNS[name] == pa.int64():
            start = buffers[buffer + 1][0]
            positions = np.frombuffer(self.read(start + 8 * first, start + 8 * end), "<i8")
            return list(positions.tolist())
        offsets = self._numbers(buffers[buffer + 1], batch.rows + 1, wide=False)[first : end + 1]
        start = buffers[buffer + 2][0]
        content = self.read(start + int(offsets[0]), start + int(offsets[-1]))
        is_present = [True] * (end - first)
        if buffers[buffer][1]:
            bits = np.frombuffer(self.read(buffers[buffer][0], sum(buffers[buffer])), np.uint8)
            is_present = np.unpackbits(bits, bitorder="little")[first:end].astype(bool).tolist()
        bounds = (offsets - offsets[0]).tolist()
        return [
            content[low:high].decode() if present else None
            for low, high, present in zip(bounds[:-1], bounds[1:], is_present, strict=True)
        ]


def _locate_batches(read: Reader, size: int) -> tuple[list[BatchLocation], int, int]:
    """Return the batches in a file, and the schema's byte range [start, end)."""
    if read(0, min(4, size)) == STREAM_MARK:
        return _locate_stream_batches(read, size)
    tail = read(max(0, size - FOOTER_READ), size)
    if len(tail) < 10 or not tail.endswith(MAGIC):
        raise IntegrityError("not a whole Arrow IPC file: its last bytes are missing")
    length = struct.unpack_from("<i", tail, len(tail) - 10)[0]
    footer = tail[-10 - length : -10]
    if length + 10 > len(tail):
        footer = read(size - 10 - length, size - 10)
    root = _FlatTable(footer, struct.unpack_from("<I", footer)[0])
    blocks = [struct.unpack_from("<qi4xq", footer, offset) for offset in root.vector(3, stride=24)]
    return blocks, 8, blocks[0][0] if blocks else size - 10 - length


def _locate_stream_batches(read: Reader, size: int) -> tuple[list[BatchLocation], int, int]:
    """Return the same for an IPC stream, from message to message."""
    blocks: list[BatchLocation] = []
    offset = schema = 0
    while True:
        prefix = read(offset, min(offset + 8, size))
        if len(prefix) < 8 or prefix[:4] != STREAM_MARK:
            raise IntegrityError(
                f"not a whole Arrow IPC stream: no message and no end is at byte {offset:,}"
            )
        header_bytes = 8 + struct.unpack_from("<i", prefix, 4)[0]
        if header_bytes == 8:  # the end of the stream
            return blocks, 0, schema
        if offset + header_bytes > size:
            raise IntegrityError("not a whole Arrow IPC stream: its last message is cut off")
        header = read(offset, offset + header_bytes)
        message = _FlatTable(header, 8 + struct.unpack_from("<I", header, 8)[0])
        body_field = message.field(3)
        body_bytes = struct.unpack_from("<q", header, body_field)[0] if body_field else 0
        schema = schema or header_bytes
        if offset + header_bytes + body_bytes > size:
            raise IntegrityError("not a whole Arrow IPC stream: its last message is cut off")
        if header[message.field(1)] == RECORD_BATCH_TYPE:
            blocks.append((offset, header_bytes, body_bytes))
        offset += header_bytes + body_bytes


def _read_header(read: Reader, block: BatchLocation) -> _FlatTable:
    """Read a record batch's header."""
    offset, header_bytes, _ = block
    data = read(offset, offset + header_bytes)
    start = 8 if data[:4] == b"\xff\xff\xff\xff" else 4
    return _FlatTable(data, start + struct.unpack_from("<I", data, start)[0]).table(2)


def _row_count(batch: _FlatTable) -> int:
    offset = batch.field(0)
    return int(struct.unpack_from("<q", batch.data, offset)[0]) if offset else 0


def is_list(arrow_type: Any) -> bool:
    types = pa.types
    return any(
        predicate(arrow_type)
        for predicate in (
            types.is_list,
            types.is_large_list,
            types.is_fixed_size_list,
            types.is_list_view,
            types.is_large_list_view,
        )
    )


def _buffer_count(arrow_type: Any, view_counts: list[int]) -> int:
    """Return a column's number of buffers, children included. `view_counts` has the counts of
    variadic buffers for the batch's remaining view columns; counts used here are removed."""
    types = pa.types
    if types.is_null(arrow_type):
        return 0
    children = sum(
        _buffer_count(arrow_type.field(k).type, view_counts) for k in range(arrow_type.num_fields)
    )
    if types.is_struct(arrow_type) or types.is_fixed_size_list(arrow_type):
        return 1 + children
    if types.is_list(arrow_type) or types.is_large_list(arrow_type) or types.is_map(arrow_type):
        return 2 + children
    if types.is_list_view(arrow_type) or types.is_large_list_view(arrow_type):
        return 3 + children
    if types.is_string_view(arrow_type) or types.is_binary_view(arrow_type):
        return 2 + view_counts.pop(0)
    if any(
        predicate(arrow_type)
        for predicate in (
            types.is_string,
            types.is_large_string,
            types.is_binary,
            types.is_large_binary,
        )
    ):
        return 3
    if (
        types.is_primitive(arrow_type)
        or types.is_dictionary(arrow_type)
        or types.is_fixed_size_binary(arrow_type)
    ):
        return 2
    raise InputError(f"the Arrow file has a column of type {arrow_type}, which cannot be indexed")


class _FlatTable:
    """A flatbuffers table: its vtable holds the offset of each numbered field."""

    def __init__(self, data: bytes, position: int) -> None:
        self.data = data
        self.position = position
        self.vtable = position - struct.unpack_from("<i", data, position)[0]
        self.size = struct.unpack_from("<H", data, self.vtable)[0]

    def field(self, number: int) -> int:
        """Return a field's offset, or 0 if the field is absent."""
        slot = 4 + 2 * number
        if slot >= self.size:
            return 0
        offset = int(struct.unpack_from("<H", self.data, self.vtable + slot)[0])
        return self.position + offset if offset else 0

    def table(self, number: int) -> _FlatTable:
        at = self.field(number)
        return _FlatTable(self.data, at + struct.unpack_from("<I", self.data, at)[0])

    def vector(self, number: int, *, stride: int) -> list[int]:
        """Return the element offsets in a vector of structs."""
        at = self.field(number)
        if not at:
            return []
        start = at + struct.unpack_from("<I", self.data, at)[0]
        count = struct.unpack_from("<I", self.data, start)[0]
        return [start + 4 + stride * k for k in range(count)]
