"""Read a long file's lines chunk by chunk, as numeric columns."""

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
"""Bytes in memory at once."""


@dataclass(frozen=True)
class LineChunk:
    """Complete consecutive lines."""

    first: int
    """The first line's number in the file."""
    lines: bytes
    columns: dict[str, Float64]
    offsets: Float64
    """Byte offset in the file, by line."""

    def __len__(self) -> int:
        return len(self.offsets)

    def __getitem__(self, name: str) -> Float64:
        """Return a column; NaN where a line has no such number."""
        column = self.columns.get(name)
        return np.full(len(self), np.nan) if column is None else column


def convert_losses(chunk: LineChunk, sizes: BytesPerToken) -> None:
    """Convert the chunk's losses from nats per token to bits per byte, in place."""
    weights = {name: chunk[f"weight/{name}"] for name in sizes}
    for name, factors in bits_per_nat(weights, sizes).items():
        if name in chunk.columns:
            chunk.columns[name] = chunk.columns[name] * factors


def count_lines(file: Path, size: int = CHUNK) -> tuple[int, int]:
    """Return the number of complete lines, and the offset where they end."""
    lines = end = 0
    if file.exists():
        for start, data in _blocks(file, size):
            lines += data.count(b"\n")
            last = data.rfind(b"\n") + 1
            end = start + last if last else end
    return lines, end


def chunks(file: Path, end: int, size: int = CHUNK) -> Iterator[LineChunk]:
    """Yield the lines before the offset `end`, where a line begins; about `size` bytes at once."""
    first, offset, incomplete = 0, 0, b""
    for _, block in _blocks(file, size, end):
        data = incomplete + block
        end_of_lines = data.rfind(b"\n") + 1
        data, incomplete = data[:end_of_lines], data[end_of_lines:]
        if data:
            try:
                chunk_columns, line_sizes, _ = columns(data, str(file))
            except IntegrityError:
                if (valid := valid_bytes(data)) == len(data):  # its lines have different types
                    raise
                number = first + data[:valid].count(b"\n") + 1
                raise IntegrityError(
                    f"line {number:,} of {file} is invalid", hint="restore it from a copy"
                ) from None
            offsets = offset + np.cumsum(line_sizes) - line_sizes
            yield LineChunk(first, data, chunk_columns, offsets)
            first, offset = first + len(line_sizes), offset + end_of_lines


def _blocks(file: Path, size: int, end: int | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the file's blocks with their offsets."""
    with file.open("rb") as opened:
        offset = 0
        while data := opened.read(size if end is None else min(size, end - offset)):
            yield offset, data
            offset += len(data)


def read_line(file: Path, offset: int) -> dict[str, Any]:
    with file.open("rb") as opened:
        opened.seek(offset)
        entry: dict[str, Any] = json.loads(opened.readline())
    return entry


def read_lines_before(
    file: Path, offset: int, predicate: Callable[[dict[str, Any]], bool], max_lines: int
) -> list[dict[str, Any]]:
    """Return the last lines before `offset` that satisfy the predicate, in order."""
    entries: list[dict[str, Any]] = []
    with file.open("rb") as opened:
        cut_line = b""
        while offset and len(entries) < max_lines:
            begin = max(0, offset - CHUNK // 8)
            opened.seek(begin)
            data = opened.read(offset - begin) + cut_line
            first = data.find(b"\n") + 1 if begin else 0  # the first line may be cut
            cut_line, offset = data[:first], begin
            for line in reversed(data[first:].splitlines()):
                if len(entries) < max_lines and predicate(entry := json.loads(line)):
                    entries.append(entry)
    return entries[::-1]
