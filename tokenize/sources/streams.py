"""Bytes of a file, cut at delimiters into records, with bounded memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from . import BLOCK_BYTES, LARGEST_DOCUMENT, BadRecord, Broken, File, Slice
from .files import decompressed, is_packed, open_file, read_full
from .web import is_web

BOM = b"\xef\xbb\xbf"
"""Stands at the beginning of some files, and says that they are UTF-8. It is no text."""


@dataclass(frozen=True)
class Block:
    """Whole records side by side, the delimiters between them included."""

    data: bytes
    first: int
    """The number of its first record."""
    records: int
    read: int
    """Bytes of the file that were read for it."""
    problem: BadRecord | None = None
    """Why a record is missing here."""


def cut_bytes(file: File, delimiter: bytes, size: int) -> list[Slice]:
    """Slices of a delimited file; one that is compressed, small, or behind http is one slice."""
    whole = [Slice(file, 0, file.size, 0, file.size)]
    if file.compression or 2 * file.size < 3 * size or _overlaps_itself(delimiter):
        return whole
    if is_web(file.name):
        return whole
    edges = [*range(0, file.size - size // 2, size), file.size]
    slices, records = [], 0
    with open_file(file.name) as stream:
        if is_packed(stream.read(4)):  # whatever its name says
            return whole
        for start, end in itertools.pairwise(edges):
            slices.append(Slice(file, start, end, records, end - start))
            # The first record at or after `end` is preceded by as many records as there are
            # delimiters that end before it, and the very first record.
            low = max(0, start - len(delimiter))
            stream.seek(low)
            data = read_full(stream, end - 1 - low)
            records += _count(data, delimiter) + (start == 0)
    return slices


def blocks(part: Slice, delimiter: bytes, *, unit: str, split: bool) -> Iterator[Block]:
    """The records of a slice that start in it, a block at a time.

    A record that is larger than LARGEST_DOCUMENT is cut into pieces if `split`, else it is left
    out as a Problem.
    """
    begun = part.start > 0
    for block in _blocks(part, delimiter, unit, split):
        if not begun and block.records:
            block = replace(block, data=block.data.removeprefix(BOM))
            begun = True
        yield block


def _blocks(part: Slice, delimiter: bytes, unit: str, split: bool) -> Iterator[Block]:
    reader = _chunks(part, delimiter)
    number = part.first
    carry = b""
    broken: str | None = None
    leaving_out = False
    while True:
        try:
            chunk, read = next(reader, (b"", 0))
        except Broken as error:
            chunk, broken = b"", str(error)
        if not chunk:
            break
        data = carry + chunk if carry else chunk
        cut = _last(data, delimiter)
        if cut < 0:
            carry = data
            if leaving_out:
                carry = data[-len(delimiter) :]
                yield Block(b"", number, 0, read)
            elif len(data) > LARGEST_DOCUMENT:
                if split:
                    piece = cut_text(data)
                    carry = data[len(piece) :]
                    yield Block(piece, number, 1, read)
                else:
                    leaving_out = True
                    carry = data[-len(delimiter) :]
                    yield Block(b"", number, 0, read, _too_large(part, number, unit))
            else:
                yield Block(b"", number, 0, read)
            continue
        whole, carry = data[:cut], data[cut + len(delimiter) :]
        if leaving_out:
            leaving_out = False
            end = whole.find(delimiter)
            whole = b"" if end < 0 else whole[end + len(delimiter) :]
            number += 1
            if end < 0:
                yield Block(b"", number, 0, read)
                continue
        records = _count(whole, delimiter) + 1
        yield Block(whole, number, records, read)
        number += records
    if broken is not None:
        problem = BadRecord("damaged file", broken, part.file.name, number, unit)
        yield Block(b"", number, 0, 0, problem)
    elif carry and not leaving_out:
        yield Block(carry, number, 1, 0)


def _chunks(part: Slice, delimiter: bytes) -> Iterator[tuple[bytes, int]]:
    """The bytes of the records that start in a slice, the last one's delimiter included; and how
    many bytes of the file were read for them."""
    if part.file.compression or (part.start == 0 and part.end >= part.file.size):
        yield from decompressed(part.file)
        return
    with open_file(part.file.name) as stream:
        at = max(0, part.start - len(delimiter))
        stream.seek(at)
        skipping = part.start > 0
        tail = b""
        while True:
            chunk = read_full(stream, BLOCK_BYTES)
            if not chunk:
                break
            data = tail + chunk
            begin = at - len(tail)
            at += len(chunk)
            tail = b""
            if skipping:
                found = data.find(delimiter)
                if found < 0:
                    if at >= part.end:
                        return  # no record begins here
                    tail = data[-(len(delimiter) - 1) :] if len(delimiter) > 1 else b""
                    continue
                skipping = False
                begin += found + len(delimiter)
                data = data[found + len(delimiter) :]
                if begin >= part.end:
                    return
            # The slice ends with the first delimiter that ends at or after its end.
            low = max(0, part.end - begin - len(delimiter))
            found = data.find(delimiter, low) if begin + len(data) >= part.end else -1
            if found >= 0:
                data = data[: found + len(delimiter)]
                yield data, len(data)
                return
            if keep := len(delimiter) - 1:  # a delimiter may lie across two chunks
                tail = data[-keep:]
                data = data[:-keep]
            if data:
                yield data, len(data)
    if tail and not skipping:
        yield tail, len(tail)


def cut_text(data: bytes) -> bytes:
    """A first piece of a long text, cut before a space if there is one near, else between
    characters."""
    end = min(BLOCK_BYTES, LARGEST_DOCUMENT // 2)
    space = data.rfind(b" ", end - 4096, end)
    if space > 0:
        return data[:space]
    while end < len(data) and data[end] & 0xC0 == 0x80:
        end -= 1
    return data[:end]


def _too_large(part: Slice, number: int, unit: str) -> BadRecord:
    limit = LARGEST_DOCUMENT >> 20
    return BadRecord(
        "too large", f"a document of more than {limit} MiB", part.file.name, number, unit
    )


def is_utf8(data: bytes) -> bool:
    import pyarrow as pa

    if data.isascii():
        return True
    bounds = pa.py_buffer(np.array([0, len(data)], np.int64))
    one = pa.Array.from_buffers(pa.large_string(), 1, [None, bounds, pa.py_buffer(data)])
    try:
        one.validate(full=True)  # several times as fast as decoding
    except pa.ArrowInvalid:
        return False
    return True


def _count(data: bytes, delimiter: bytes) -> int:
    if len(delimiter) > 1:
        return data.count(delimiter)
    return int(np.count_nonzero(np.frombuffer(data, np.uint8) == delimiter[0]))


def _last(data: bytes, delimiter: bytes) -> int:
    """Where the last delimiter begins, found from the left."""
    if not _overlaps_itself(delimiter):
        return data.rfind(delimiter)
    return len(data) - len(data.split(delimiter)[-1]) - len(delimiter)


def _overlaps_itself(delimiter: bytes) -> bool:
    """Whether its occurrences depend on where one begins to look ("\\n\\n" in "\\n\\n\\n")."""
    return any(delimiter.startswith(delimiter[k:]) for k in range(1, len(delimiter)))
