"""Lines of a long file, a chunk at a time, as columns of numbers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ....console.errors import IntegrityError
from ....dataplane.arrays import Float64
from ...board.byte_sizes import BytesPerToken, bits_per_nat
from ...board.columns import columns, valid_bytes

CHUNK = 2 << 20
"""Bytes of lines in memory at once."""


@dataclass(frozen=True)
class Chunk:
    """Whole lines of a file."""

    first: int
    """Number of its first line in the file."""
    lines: bytes
    columns: dict[str, Float64]
    places: Float64
    """Offset of each line in the file."""

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, name: str) -> Float64:
        """Return a column, NaN where a line has no such number."""
        found = self.columns.get(name)
        return np.full(len(self), np.nan) if found is None else found


def convert(chunk: Chunk, sizes: BytesPerToken) -> None:
    """Replace the losses of a chunk by bits per byte."""
    weights = {name: chunk[f"weight/{name}"] for name in sizes}
    for name, factors in bits_per_nat(weights, sizes).items():
        if name in chunk.columns:
            chunk.columns[name] = chunk.columns[name] * factors


def count(file: Path, size: int = CHUNK) -> tuple[int, int]:
    """Return the number of whole lines of a file, and the bytes that they take."""
    lines = end = 0
    if file.exists():
        for start, data in _blocks(file, size):
            lines += data.count(b"\n")
            last = data.rfind(b"\n") + 1
            end = start + last if last else end
    return lines, end


def chunks(file: Path, end: int, size: int = CHUNK) -> Iterator[Chunk]:
    """Yield the lines before the byte `end`, where a line begins; about `size` bytes at a time."""
    first, offset, rest = 0, 0, b""
    for _, block in _blocks(file, size, end):
        data = rest + block
        whole = data.rfind(b"\n") + 1
        data, rest = data[:whole], data[whole:]
        if data:
            try:
                found, sizes, _ = columns(data, str(file))
            except IntegrityError:
                if (valid := valid_bytes(data)) == len(data):  # its lines have different types
                    raise
                number = first + data[:valid].count(b"\n") + 1
                what, hint = f"line {number:,} of {file} is invalid", "restore it from a copy"
                raise IntegrityError(what, hint=hint) from None
            yield Chunk(first, data, found, offset + np.cumsum(sizes) - sizes)
            first, offset = first + len(sizes), offset + whole


def _blocks(file: Path, size: int, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    with file.open("rb") as opened:
        place = 0
        while data := opened.read(size if end is None else min(size, end - place)):
            yield place, data
            place += len(data)


def line_at(file: Path, place: int) -> dict[str, Any]:
    with file.open("rb") as opened:
        opened.seek(place)
        found: dict[str, Any] = json.loads(opened.readline())
    return found


def lines_before(
    file: Path, place: int, wanted: Callable[[dict[str, Any]], bool], most: int
) -> list[dict[str, Any]]:
    """Return the last lines before a place that are wanted, at most so many, in order."""
    found: list[dict[str, Any]] = []
    with file.open("rb") as opened:
        rest = b""
        while place and len(found) < most:
            begin = max(0, place - CHUNK // 8)
            opened.seek(begin)
            data = opened.read(place - begin) + rest
            first = data.find(b"\n") + 1 if begin else 0  # the first line may be cut
            rest, place = data[:first], begin
            for line in reversed(data[first:].splitlines()):
                if len(found) < most and wanted(entry := json.loads(line)):
                    found.append(entry)
    return found[::-1]
