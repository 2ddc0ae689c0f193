"""Records between delimiters: cut files into slices, and read blocks with bounded memory.

Lines end with a line feed, with or without a carriage return before it; any other carriage return
is a character. A byte-order mark at a file's beginning is left out.
"""

from __future__ import annotations

import io
import itertools
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import BinaryIO

import numpy as np

from ...dataplane.arrays import count_byte
from ..files.input_file import BLOCK_BYTES, DamagedFile, File, is_web
from ..files.open_file import HEAD_BYTES, is_compressed, open_input, read_decompressed, read_full
from .format import LIMITS, BadRecord, ReadLimits, Slice

OVERRUN_BYTES = BLOCK_BYTES // 4
"""Bytes read at once beyond a slice's end, to complete the last record."""
SEARCH_BYTES = 64 << 10
"""Bytes read at once to find a slice's first record."""
BOM = b"\xef\xbb\xbf"
"""Byte-order mark: some UTF-8 files begin with it; it is not text."""


@dataclass(frozen=True)
class RecordBlock:
    """Consecutive whole records, with the delimiters between them."""

    buffer: bytes
    """Bytes as they were read: the records, and what stands around them."""
    first: int
    """The first record's number in the file."""
    records: int
    read: int
    """File bytes read for the block."""
    problem: BadRecord | None = None
    """Why a record is missing here."""
    start: int = 0
    """Where the records begin in `buffer`."""
    end: int | None = None
    """Where they end; None: with the buffer."""

    @property
    def data(self) -> bytes:
        return self.buffer[self.start : self.end]

    def lines(self) -> Iterator[bytes]:
        """Yield the records of a file of lines, with their line feeds, each copied on its own, so
        that it is in the processor's cache when it is parsed."""
        stream = io.BytesIO(self.buffer)
        stream.seek(self.start)
        return itertools.islice(stream, self.records)


def cut_bytes(file: File, delimiter: bytes, size: int) -> list[Slice]:
    """Cut a delimited file. A small, compressed or http(s) file is one slice."""
    single_slice = [Slice(file, 0, file.size, 0, file.size)]
    if file.compression or 2 * file.size < 3 * size or _overlaps_itself(delimiter):
        return single_slice
    if is_web(file.name):
        return single_slice
    edges = [*range(0, file.size - size // 2, size), file.size]
    slices, records = [], 0
    sliced_file = file
    if file.checksums is not None:  # tasks do not need the counts
        sliced_file = replace(file, checksums=replace(file.checksums, line_feeds=b""))
    with open_input(file) as stream:
        if is_compressed(stream.read(HEAD_BYTES)):  # regardless of its name
            return single_slice
        for start, end in itertools.pairwise(edges):
            slices.append(Slice(sliced_file, start, end, records, end - start))
            if end < file.size:
                # Records before the first one at or after `end`: the delimiters that end before
                # it, plus one.
                records += _count_delimiters(file, stream, delimiter, start, end) + (start == 0)
    return slices


def _count_delimiters(file: File, stream: BinaryIO, delimiter: bytes, start: int, end: int) -> int:
    """Count the delimiters that end in the bytes [start, end - 1)."""
    if delimiter == b"\n" and file.checksums is not None:
        line_feeds = file.checksums.count_line_feeds(start, end)
        if line_feeds is not None:
            return line_feeds
    search_start = max(0, start - len(delimiter))
    stream.seek(search_start)
    data = read_full(stream, end - 1 - search_start)
    return _count(data, delimiter, 0, len(data))


def _count(data: bytes, delimiter: bytes, start: int, end: int) -> int:
    if len(delimiter) > 1:
        return data.count(delimiter, start, end)
    return count_byte(memoryview(data)[start:end], delimiter)


def record_blocks(
    file_slice: Slice, delimiter: bytes, limits: ReadLimits = LIMITS, *, unit: str, split: bool
) -> Iterator[RecordBlock]:
    """Yield the records that start in a slice, in blocks.

    A record larger than `document_bytes` is cut into pieces if `split`; otherwise it is skipped and
    reported as a BadRecord.
    """
    bom_removed = file_slice.start > 0
    cutter = _BlockCutter(file_slice, delimiter, limits, unit, split)
    for block in cutter.cut(_chunks(file_slice, delimiter, limits.block_bytes)):
        if not bom_removed and block.records:
            if block.first == 0 and block.buffer.startswith(BOM, block.start):
                block = replace(block, start=block.start + len(BOM))
            bom_removed = True
        yield block


class _BlockCutter:
    """Cuts a slice's chunks into blocks of whole records."""

    def __init__(
        self, file_slice: Slice, delimiter: bytes, limits: ReadLimits, unit: str, split: bool
    ) -> None:
        self.file_name = file_slice.file.name
        self.delimiter, self.limits, self.unit, self.split = delimiter, limits, unit, split
        self.number = file_slice.first
        """Number of the next record."""
        self.carry = b""
        """Bytes of a record whose end is not read yet."""
        self.skipping = False
        """True within a record that is left out: `carry` holds no more than a delimiter's bytes."""

    def cut(self, chunks: Iterator[tuple[bytes, int]]) -> Iterator[RecordBlock]:
        try:
            for chunk, read in chunks:
                yield from self._cut_chunk(chunk, read)
        except DamagedFile as error:
            yield self._empty(0, self._problem("damaged file", str(error)))
            return
        if self.carry and not self.skipping:
            yield RecordBlock(self.carry, self.number, 1, 0)

    def _cut_chunk(self, chunk: bytes, read: int) -> Iterator[RecordBlock]:
        start = 0
        if self.carry and len(self.delimiter) == 1 and not self.skipping:
            # A record that spans two chunks is a block of its own, so that chunks are not copied.
            end = chunk.find(self.delimiter)
            if 0 <= end <= self.limits.document_bytes - len(self.carry):
                yield RecordBlock(self.carry + chunk[:end], self.number, 1, 0)
                self.carry, start = b"", end + 1
                self.number += 1
        data = self.carry + chunk if self.carry else chunk
        cut = _find_last(data, self.delimiter)
        if cut < start:
            yield self._lengthen_carry(data[start:], read)
            return
        self.carry = data[cut + len(self.delimiter) :]
        if self.skipping:
            self.skipping = False
            self.number += 1
            end = data.find(self.delimiter)
            start = end + len(self.delimiter)
            if end == cut:
                yield self._empty(read)
                return
        # Only the first record can be too large: the others began in this chunk.
        if start == 0 and cut > self.limits.document_bytes:
            rest = yield from self._shorten_first_record(data[:cut])
            if rest is None:
                yield self._empty(read)
                return
            data, cut = rest, len(rest)
        num_records = _count(data, self.delimiter, start, cut) + 1
        yield RecordBlock(data, self.number, num_records, read, start=start, end=cut)
        self.number += num_records

    def _lengthen_carry(self, record: bytes, read: int) -> RecordBlock:
        """Keep a record that goes on in the next chunk. Return its first piece if it is too large
        already, or what is said in its place."""
        if self.skipping or len(record) <= self.limits.document_bytes:
            self.carry = record[-len(self.delimiter) :] if self.skipping else record
            return self._empty(read)
        if self.split:
            piece = first_piece(record, self.limits)
            self.carry = record[len(piece) :]
            return RecordBlock(piece, self.number, 1, read)
        self.skipping = True
        self.carry = record[-len(self.delimiter) :]
        return self._empty(read, self._problem(*self.limits.too_large))

    def _shorten_first_record(self, records: bytes) -> Generator[RecordBlock, None, bytes | None]:
        """Yield a first record's pieces, or what is said in its place, if it is too large. Return
        the rest of the records; None if there is no other record."""
        max_bytes = self.limits.document_bytes
        end = records.find(self.delimiter)
        size = len(records) if end < 0 else end
        while self.split and size > max_bytes:
            piece = first_piece(records[:size], self.limits)
            yield RecordBlock(piece, self.number, 1, 0)
            records, size = records[len(piece) :], size - len(piece)
        if size > max_bytes:
            yield self._empty(0, self._problem(*self.limits.too_large))
            self.number += 1
            return None if end < 0 else records[end + len(self.delimiter) :]
        return records

    def _empty(self, read: int, problem: BadRecord | None = None) -> RecordBlock:
        return RecordBlock(b"", self.number, 0, read, problem)

    def _problem(self, kind: str, message: str) -> BadRecord:
        return BadRecord(kind, message, self.file_name, self.number, self.unit)


def _chunks(file_slice: Slice, delimiter: bytes, block_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Yield the bytes of records that start in a slice, including the last record's delimiter, and
    how many of the file's bytes were read for them."""
    if file_slice.file.compression or (
        file_slice.start == 0 and file_slice.end >= file_slice.file.size
    ):
        yield from read_decompressed(file_slice.file)
        return
    with open_input(file_slice.file) as stream:
        position = max(0, file_slice.start - len(delimiter))
        stream.seek(position)
        skipping = file_slice.start > 0
        tail = b""
        while True:
            size = max(file_slice.end - position, OVERRUN_BYTES)
            chunk = read_full(stream, min(block_bytes, SEARCH_BYTES if skipping else size))
            if not chunk:
                break
            data = tail + chunk
            data_start = position - len(tail)
            position += len(chunk)
            tail = b""
            if skipping:
                match = data.find(delimiter)
                if match < 0:
                    if position >= file_slice.end:
                        return  # no record starts in this slice
                    tail = data[-(len(delimiter) - 1) :] if len(delimiter) > 1 else b""
                    continue
                skipping = False
                data_start += match + len(delimiter)
                data = data[match + len(delimiter) :]
                if data_start >= file_slice.end:
                    return
            # The slice ends at the first delimiter that ends at or after `file_slice.end`.
            search_start = max(0, file_slice.end - data_start - len(delimiter))
            match = (
                data.find(delimiter, search_start)
                if data_start + len(data) >= file_slice.end
                else -1
            )
            if match >= 0:
                data = data[: match + len(delimiter)]
                yield data, len(data)
                return
            if keep := len(delimiter) - 1:  # a delimiter may span two chunks
                tail = data[-keep:]
                data = data[:-keep]
            if data:
                yield data, len(data)
    if tail and not skipping:
        yield tail, len(tail)


def first_piece(data: bytes, limits: ReadLimits) -> bytes:
    """Return a long text's first piece, cut before a nearby space, or else between characters."""
    end = min(limits.block_bytes, limits.document_bytes // 2)
    space = data.rfind(b" ", end - 4096, end)
    if space > 0:
        return data[:space]
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end -= 1
    return data[:end]


def is_utf8(data: bytes) -> bool:
    """Return True if the bytes are valid UTF-8."""
    import pyarrow as pa

    if data.isascii():
        return True
    bounds = pa.py_buffer(np.array([0, len(data)], np.int64))
    array = pa.Array.from_buffers(pa.large_string(), 1, [None, bounds, pa.py_buffer(data)])
    try:
        array.validate(full=True)  # several times as fast as decoding
    except pa.ArrowInvalid:
        return False
    return True


def _find_last(data: bytes, delimiter: bytes) -> int:
    """Return the last delimiter's position; delimiters are matched from the left."""
    if not _overlaps_itself(delimiter):
        return data.rfind(delimiter)
    return len(data) - len(data.split(delimiter)[-1]) - len(delimiter)


def _overlaps_itself(delimiter: bytes) -> bool:
    """Return True if matches depend on where a search starts ("\\n\\n" in "\\n\\n\\n")."""
    return any(delimiter.startswith(delimiter[k:]) for k in range(1, len(delimiter)))
