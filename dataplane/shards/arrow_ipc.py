"""The metadata of Arrow IPC files and streams: where the buffers of a column are in the file.

They are read from the metadata alone: the footer of a file, or the messages of a stream one after
the other; then each batch's header, and the offsets of its lists. pyarrow does not expose the
offset of a buffer in its file, hence the flatbuffers reader at the end.
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

MAGIC, STREAM = b"ARROW1", b"\xff\xff\xff\xff"
TAIL = 4 << 10
RECORD_BATCH = 3
"""Type of a message's header, in a stream."""
ORIGINS = {"file": pa.string(), "position": pa.int64(), "id": pa.string()}
"""Columns of the origins of documents, in files of our own."""

Block = tuple[int, int, int]
"""A record batch in its file: its offset, the bytes of its header, and those of its body."""


def batch_rows(read: Reader, size: int) -> list[int]:
    """Return the rows of each record batch of an Arrow file, reading only the headers."""
    return [_rows(_batch(read, block)) for block in _blocks(read, size)[0]]


@dataclass(frozen=True)
class RecordBatch:
    """A record batch: its rows, and (offset, bytes) in the file of each of its buffers."""

    rows: int
    buffers: list[tuple[int, int]]
    first: dict[str, int]
    """Number of a column's first buffer."""


class IpcFile:
    """The metadata of an Arrow file: schema, record batches, and offsets of their buffers."""

    def __init__(self, read: Reader, size: int) -> None:
        self.read = read
        self.blocks, first, end = _blocks(read, size)
        self.schema = pa.ipc.read_schema(pa.py_buffer(read(first, end)))

    @property
    def has_origins(self) -> bool:
        """True if the file has the columns of ORIGINS."""
        names = self.schema.names
        return all(
            names.count(name) == 1 and self.schema.field(name).type == kind
            for name, kind in ORIGINS.items()
        )

    @property
    def compressed(self) -> bool:
        """True if the buffers of a record batch are compressed."""
        return any(_batch(self.read, block).field(3) for block in self.blocks)

    def check_column(self, name: str) -> None:
        """Raise if the file has no such column."""
        if (count := self.schema.names.count(name)) != 1:
            known = ", ".join(self.schema.names)
            found = f"{count} columns" if count else "no column"
            raise InputError(f"the Arrow file has {found} `{name}`", hint=f"its columns: {known}")

    def nested(self, name: str) -> bool:
        """Return True if the rows of a column are lists."""
        return is_list(self.schema.field(name).type)

    def batch(self, block: Block) -> RecordBatch:
        """Read the header of a record batch."""
        offset, head, _ = block
        batch = _batch(self.read, block)
        assert not batch.field(3), "files with compressed buffers are read in their flat form"
        places = [struct.unpack_from("<qq", batch.data, at) for at in batch.vector(2, stride=16)]
        views = [struct.unpack_from("<q", batch.data, at)[0] for at in batch.vector(4, stride=8)]
        first, at = {}, 0
        for field in self.schema:
            first[field.name] = at
            at += _buffer_count(field.type, views)
        return RecordBatch(
            _rows(batch), [(offset + head + start, length) for start, length in places], first
        )

    def documents(self, batch: RecordBatch, name: str) -> tuple[Int64, Int64, int]:
        """Return the first value and the length of each document of a batch, and the offset of the
        column's values in the file."""
        at = batch.first[name]
        kind = self.schema.field(name).type
        types = pa.types
        if not is_list(kind):  # the batch is a document
            first, lengths = np.zeros(1, np.int64), np.array([batch.rows], np.int64)
            validity, values = at, at + 1
        elif types.is_fixed_size_list(kind):
            first = np.arange(batch.rows, dtype=np.int64) * kind.list_size
            lengths = np.full(batch.rows, kind.list_size, np.int64)
            validity, values = at + 1, at + 2
        elif types.is_list_view(kind) or types.is_large_list_view(kind):
            wide = types.is_large_list_view(kind)
            first = self._numbers(batch.buffers[at + 1], batch.rows, wide=wide)
            lengths = self._numbers(batch.buffers[at + 2], batch.rows, wide=wide)
            validity, values = at + 3, at + 4
        else:
            wide = types.is_large_list(kind)
            edges = self._numbers(batch.buffers[at + 1], batch.rows + 1, wide=wide)
            first, lengths = edges[:-1], np.diff(edges)
            validity, values = at + 2, at + 3
        low = int(first.min()) if len(first) else 0
        high = int((first + lengths).max()) if len(first) else 0
        if is_list(kind) and batch.buffers[at][1]:
            self.check_no_nulls(name, batch.buffers[at], 0, batch.rows)
        self.check_no_nulls(name, batch.buffers[validity], low, high)
        return first, lengths, batch.buffers[values][0]

    def _numbers(self, buffer: tuple[int, int], count: int, *, wide: bool) -> Int64:
        """Return the first `count` offsets or sizes of a column."""
        if not buffer[1]:
            return np.zeros(count, np.int64)  # of a batch without rows
        dtype = np.dtype("<i8" if wide else "<i4")
        data = self.read(buffer[0], buffer[0] + count * dtype.itemsize)
        return np.frombuffer(data, dtype).astype(np.int64)

    def check_no_nulls(self, name: str, validity: tuple[int, int], first: int, last: int) -> None:
        """Raise if an id is null: the buffer may hold any number there."""
        start, length = validity
        if length:
            bits = np.frombuffer(self.read(start, start + length), np.uint8)
            if not np.unpackbits(bits, bitorder="little")[first:last].all():
                raise InputError(f"the column `{name}` has nulls among its ids")

    def values(self, name: str, batch: RecordBatch, low: int, high: int) -> list[Any]:
        """Return the rows [low, high) of a column of ORIGINS, reading only those rows."""
        at, buffers = batch.first[name], batch.buffers
        if ORIGINS[name] == pa.int64():
            start = buffers[at + 1][0]
            places = np.frombuffer(self.read(start + 8 * low, start + 8 * high), "<i8")
            return list(places.tolist())
        offsets = self._numbers(buffers[at + 1], batch.rows + 1, wide=False)[low : high + 1]
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


def _blocks(read: Reader, size: int) -> tuple[list[Block], int, int]:
    """Return the record batches of a file, and the range of bytes that holds its schema."""
    if read(0, min(4, size)) == STREAM:
        return _stream_blocks(read, size)
    tail = read(max(0, size - TAIL), size)
    if len(tail) < 10 or not tail.endswith(MAGIC):
        raise IntegrityError("not a whole Arrow IPC file: its last bytes are missing")
    length = struct.unpack_from("<i", tail, len(tail) - 10)[0]
    footer = tail[-10 - length : -10]
    if length + 10 > len(tail):
        footer = read(size - 10 - length, size - 10)
    root = _Table(footer, struct.unpack_from("<I", footer)[0])
    blocks = [struct.unpack_from("<qi4xq", footer, at) for at in root.vector(3, stride=24)]
    return blocks, 8, blocks[0][0] if blocks else size - 10 - length


def _stream_blocks(read: Reader, size: int) -> tuple[list[Block], int, int]:
    """The same for an IPC stream, whose messages are found one after the other."""
    blocks: list[Block] = []
    at = schema = 0
    while True:
        mark = read(at, min(at + 8, size))
        if len(mark) < 8 or mark[:4] != STREAM:
            raise IntegrityError(
                f"not a whole Arrow IPC stream: no message and no end is at byte {at:,}"
            )
        head = 8 + struct.unpack_from("<i", mark, 4)[0]
        if head == 8:  # the end of the stream
            return blocks, 0, schema
        if at + head > size:
            raise IntegrityError("not a whole Arrow IPC stream: its last message is cut off")
        data = read(at, at + head)
        message = _Table(data, 8 + struct.unpack_from("<I", data, 8)[0])
        length = message.field(3)
        body = struct.unpack_from("<q", data, length)[0] if length else 0
        schema = schema or head
        if at + head + body > size:
            raise IntegrityError("not a whole Arrow IPC stream: its last message is cut off")
        if data[message.field(1)] == RECORD_BATCH:
            blocks.append((at, head, body))
        at += head + body


def _batch(read: Reader, block: Block) -> _Table:
    """Read the header of a record batch."""
    offset, head, _ = block
    data = read(offset, offset + head)
    start = 8 if data[:4] == b"\xff\xff\xff\xff" else 4
    return _Table(data, start + struct.unpack_from("<I", data, start)[0]).table(2)


def _rows(batch: _Table) -> int:
    at = batch.field(0)
    return int(struct.unpack_from("<q", batch.data, at)[0]) if at else 0


def is_list(kind: Any) -> bool:
    types = pa.types
    return any(
        test(kind)
        for test in (
            types.is_list,
            types.is_large_list,
            types.is_fixed_size_list,
            types.is_list_view,
            types.is_large_list_view,
        )
    )


def _buffer_count(kind: Any, views: list[int]) -> int:
    """Return the number of buffers of a column of this type, children included. `views` holds the
    numbers of further buffers of the batch's columns of views, and loses those of this column."""
    types = pa.types
    if types.is_null(kind):
        return 0
    children = sum(_buffer_count(kind.field(k).type, views) for k in range(kind.num_fields))
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        return 1 + children
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        return 2 + children
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return 3 + children
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return 2 + views.pop(0)
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
