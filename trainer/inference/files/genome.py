"""Sequences of a FASTA file, read by an index instead of whole.

An index holds, by sequence, its length, the offset of its first letter, and the lengths of its
lines. A compressed file is unpacked once into a temporary file, which ends with the process.
"""

from __future__ import annotations

import gzip
import hashlib
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from ....console.errors import InputError
from .lines import GZIP, naming_faults

BLOCK = 1 << 25
"""Bytes whose line ends are checked at once."""
BREAKS = b"\r\n"
COMPLEMENT = bytes.maketrans(b"ACGTURYKMBDHVacgturykmbdhv", b"TGCAAYRMKVHDBtgcaayrmkvhdb")
"""IUPAC codes; S, W, N and gaps are their own complements."""


def reverse_complement(sequence: str) -> str:
    """Return the other strand, in its reading direction; lower case stays lower case."""
    return sequence.encode().translate(COMPLEMENT)[::-1].decode()


@dataclass(frozen=True)
class Sequence:
    """Place of a sequence in its file."""

    name: str
    length: int
    offset: int
    """Offset of the first letter."""
    line_letters: int
    line_bytes: int
    """Letters of a line, and bytes with its line end."""

    def offset_of(self, position: int) -> int:
        line, column = divmod(position, self.line_letters)
        return self.offset + line * self.line_bytes + column


class Genome:
    """The sequences of a FASTA file by name."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._data = _map_unpacked(path)
        self.sequences: dict[str, Sequence] = {}
        for sequence in self._index():
            if sequence.name in self.sequences:
                raise InputError(
                    f"{path} holds two sequences with the name {sequence.name!r}",
                    hint="rename one of them",
                )
            self.sequences[sequence.name] = sequence

    def fetch(self, name: str, start: int, end: int) -> str:
        """Return letters [start, end) of a sequence, as the file has them."""
        sequence = self.sequences[name]
        if start >= end:
            return ""
        data = self._data[sequence.offset_of(start) : sequence.offset_of(end - 1) + 1]
        return data.translate(None, BREAKS).decode("ascii", "replace")

    def length(self, name: str, where: str) -> int:
        """Return a sequence's length, or raise an error at `where` if it does not exist."""
        if name not in self.sequences:
            names = list(self.sequences)
            shown = f"{', '.join(names[:5])}{', …' * (len(names) > 5)}"
            raise InputError(
                f"{where}: {self.path} has no sequence {name!r}",
                hint=f"its sequences are {shown}",
            )
        return self.sequences[name].length

    @property
    def fingerprint(self) -> str:
        """Hash of names and lengths."""
        lines = [f"{sequence.name} {sequence.length}\n" for sequence in self.sequences.values()]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def _index(self) -> Iterator[Sequence]:
        data, size = self._data, len(self._data)
        start = 0
        if data[:1] != b">":
            raise InputError(
                f"{self.path} does not begin with `>`: this is no FASTA file",
                hint="name a FASTA file, plain or compressed with gzip",
            )
        while start < size:
            header_end = data.find(b"\n", start)
            header_end = size if header_end < 0 else header_end
            words = data[start + 1 : header_end].split()
            name = words[0].decode(errors="replace") if words else ""
            end = data.find(b"\n>", header_end)
            end = size if end < 0 else end
            yield self._locate(name, header_end + 1, end)
            start = end + 1

    def _locate(self, name: str, start: int, end: int) -> Sequence:
        """Locate the sequence in bytes [start, end), whose lines must have one length."""
        data = self._data
        while end > start and data[end - 1] in BREAKS:
            end -= 1
        if end <= start:
            return Sequence(name, 0, start, 1, 2)
        line_end = data.find(b"\n", start, end)
        if line_end < 0:
            return Sequence(name, end - start, start, end - start, end - start + 1)
        line_bytes = line_end + 1 - start
        break_bytes = 1 + (data[line_end - 1] in BREAKS)
        breaks = (end - start) // line_bytes
        step = max(1, BLOCK // line_bytes) * line_bytes
        counted, placed = 0, 0
        for block_start in range(start, end, step):
            count = min(step, end - block_start)
            is_break = np.frombuffer(data, np.uint8, count, block_start) == ord("\n")
            counted += int(np.count_nonzero(is_break))
            placed += int(np.count_nonzero(is_break[line_bytes - 1 :: line_bytes]))
        if not counted == placed == breaks:
            raise InputError(
                f"{self.path}: the lines of {name!r} have different lengths, so that its letters "
                "cannot be located",
                hint="write it with equal lines: seqkit seq -w 60",
            )
        length = end - start - breaks * break_bytes
        return Sequence(name, length, start, line_bytes - break_bytes, line_bytes)


def _map_unpacked(path: str) -> mmap.mmap:
    """Map a file's contents, or those of a temporary file to which it is unpacked."""
    with naming_faults(path), Path(path).open("rb") as file:
        if file.read(len(GZIP)) != GZIP:
            return _map(path, file)
        file.seek(0)
        with gzip.open(file) as packed, tempfile.TemporaryFile() as unpacked:
            shutil.copyfileobj(packed, unpacked, BLOCK)
            unpacked.flush()
            return _map(path, unpacked)


def _map(path: str, file: IO[bytes]) -> mmap.mmap:
    if not os.fstat(file.fileno()).st_size:
        raise InputError(f"{path} is empty", hint="name a FASTA file")
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # it outlives the file's handle
