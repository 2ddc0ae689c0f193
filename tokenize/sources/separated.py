"""CSV and TSV: one document per row, with the text in a column that the first row names.

Commas separate the values, and tabs in files whose name says so. A file whose first row lacks the
columns, but has them between semicolons, bars or the other of these two, is read like that.

A quoted value may contain line breaks, so that no place inside a file is known to be between two
rows: a file is one slice.
"""

from __future__ import annotations

import csv
import itertools
import posixpath
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..files.input_file import DamagedFile, File
from ..files.open_file import decompressed
from .columns import column_problem, own_columns
from .delimited import BOM
from .fields import FieldKind, FieldProblem, table_of, value_of_text
from .format import LIMITS, BadRecord, CorpusFormat, ReadLimits, Slice, SourceConfig, Texts

UNIT = "row"
TAB_ENDINGS = ("tsv", "tab")
"""Endings of files whose values are separated by tabs; in all others commas separate them."""
SEPARATORS = (",", "\t", ";", "|")
"""Separators that are tried where the usual one does not give the columns."""


class Separated(CorpusFormat):
    """Rows of values; the first row names the columns."""

    endings = ("csv", *TAB_ENDINGS)
    settings = ("text_field", "id_field", "keep")

    def cut(self, file: File, config: SourceConfig, size: int) -> list[Slice]:
        return [Slice(file, 0, file.size, 0, file.size)]

    def read(
        self, part: Slice, config: SourceConfig, limits: ReadLimits = LIMITS
    ) -> Iterator[Texts]:
        name = part.file.name
        lines = _Lines(part.file, limits)
        csv.field_size_limit(limits.document_bytes)  # of the process; each reader sets the same
        needed = [field.name for field in config.keep if not field.optional]
        needed = [*own_columns(config, ()), *needed]
        number = -1  # of the row before the first one, which names the columns
        try:
            rows = _rows(lines, name, lambda header: set(needed) <= set(header))
            header = next(rows, None)
            if header is None:
                return
            optional = [field.name for field in config.keep if field.optional]
            wanted = [*needed, *(column for column in optional if column in header)]
            if (what := column_problem(header, wanted)) is not None:
                yield Texts([], [], None, [BadRecord("other schema", what, name)], lines.take())
                return
            block = _Block(header, config, limits, name)
            while True:
                try:
                    row = next(rows, None)
                except csv.Error as error:
                    number += 1
                    block.reject(number, *_fault(error, limits))
                    continue
                if row is None:
                    break
                if not row:  # a blank line
                    continue
                number += 1
                block.add(number, row, lines.broken())
                if block.size >= limits.block_bytes:
                    yield block.take(lines.take())
            yield block.take(lines.take())
        except csv.Error as error:
            kind, what = _fault(error, limits)
            yield Texts([], [], None, [BadRecord(kind, what, name)], lines.take())
        except DamagedFile as error:
            problem = BadRecord("damaged file", str(error), name, number + 1, UNIT)
            if number >= 0:
                yield block.take(lines.take())
            yield Texts([], [], None, [problem])

    def field_kinds(self, part: Slice, names: Sequence[str]) -> dict[str, set[FieldKind | str]]:
        def has_one(header: list[str]) -> bool:
            return not set(names).isdisjoint(header)

        rows = _rows(_Lines(part.file, LIMITS), part.file.name, has_one)
        header = next(rows, [])
        return {name: {"string"} for name in names if name in header}


FORMAT = Separated()


class _Block:
    """Gathers the documents of consecutive rows."""

    def __init__(
        self, header: list[str], config: SourceConfig, limits: ReadLimits, name: str
    ) -> None:
        self.width, self.limits, self.name = len(header), limits, name
        self.text = header.index(config.text_field)
        self.id = None if config.id_field is None else header.index(config.id_field)
        self.keep = [
            (header.index(field.name) if field.name in header else None, field)
            for field in config.keep
        ]
        self._clear()

    def _clear(self) -> None:
        self.size = 0
        self.texts: list[str] = []
        self.positions: list[int] = []
        self.ids: list[str | None] = []
        self.fields: list[list[Any]] = []
        self.problems: list[BadRecord] = []

    def add(self, number: int, row: list[str], broken: bool) -> None:
        if len(row) != self.width:
            what = f"{len(row)} values in a row; the first row names {self.width} columns"
            self.reject(number, "broken CSV", what)
            return
        text, id = row[self.text], None if self.id is None else row[self.id]
        kept = ["" if place is None else row[place] for place, _ in self.keep]
        if broken and _has_bytes("".join([text, id or "", *kept])):
            self.reject(number, "invalid UTF-8", "bytes of the row are not UTF-8")
            return
        max_bytes = self.limits.document_bytes
        if 4 * len(text) > max_bytes and len(text.encode()) > max_bytes:
            self.reject(number, *self.limits.too_large)
            return
        try:
            fields = [
                value_of_text(value, field)
                for value, (_, field) in zip(kept, self.keep, strict=True)
            ]
        except FieldProblem as problem:
            self.reject(number, problem.kind, str(problem))
            return
        self.fields.append(fields)
        self.size += len(text)
        self.texts.append(text)
        self.positions.append(number)
        self.ids.append(id or None)

    def reject(self, number: int, kind: str, what: str) -> None:
        self.problems.append(BadRecord(kind, what, self.name, number, UNIT))

    def take(self, read: int) -> Texts:
        """Return the documents, for which `read` bytes of the file were read, and forget them."""
        ids = None if self.id is None else self.ids
        fields = None
        if self.keep:
            fields = table_of(self.fields, [field for _, field in self.keep])
        taken = Texts(self.texts, self.positions, ids, self.problems, read, fields)
        self._clear()
        return taken


class _Lines:
    """The lines of a file, for csv's reader. Bytes that are not UTF-8 become lone surrogates."""

    def __init__(self, file: File, limits: ReadLimits) -> None:
        self._read = 0
        self._broken = False
        self._lines = self._split(file, 2 * limits.document_bytes)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        try:
            return line.decode()
        except UnicodeDecodeError:
            self._broken = True
            return line.decode(errors="surrogateescape")

    def take(self) -> int:
        """Return the bytes of the file that were read since the last call."""
        read, self._read = self._read, 0
        return read

    def broken(self) -> bool:
        """Return True if a line since the last call has bytes that are not UTF-8."""
        broken, self._broken = self._broken, False
        return broken

    def _split(self, file: File, max_bytes: int) -> Iterator[bytes]:
        """Yield lines. One of more than `max_bytes` is cut: csv's reader takes less."""
        begun, carry = False, b""
        for chunk, read in decompressed(file):
            self._read += read
            data = carry + chunk
            if not begun:
                begun, data = True, data.removeprefix(BOM)
            *lines, carry = data.split(b"\n")
            yield from (line + b"\n" for line in lines)
            if len(carry) > max_bytes:
                yield carry
                carry = b""
        if carry:
            yield carry


def _rows(
    lines: Iterator[str], name: str, has_columns: Callable[[list[str]], bool]
) -> Iterator[list[str]]:
    """Return the rows of a file, by the separator with which its first line has the columns; if
    there is none, by the one with which it has the most."""
    endings = posixpath.basename(name).lower().split(".")
    usual = "\t" if any(ending in TAB_ENDINGS for ending in endings[-2:]) else ","
    first = next(lines, None)
    if first is None:
        return iter(())

    def rank(separator: str) -> tuple[bool, int]:
        try:
            header = next(csv.reader([first], delimiter=separator))
        except csv.Error:
            return False, 0
        return has_columns(header), len(header)

    ranks = {separator: rank(separator) for separator in dict.fromkeys([usual, *SEPARATORS])}
    separator = usual if ranks[usual][0] else max(ranks, key=lambda tried: ranks[tried])
    return csv.reader(itertools.chain([first], lines), delimiter=separator, strict=True)


def _fault(error: csv.Error, limits: ReadLimits) -> tuple[str, str]:
    """Return the kind and the text of a bad record for an error of csv's reader."""
    if "limit" in str(error):
        limit = limits.document_bytes >> 20
        return "too large", f"a value of more than {limit} MiB, or a quote that is never closed"
    return "broken CSV", str(error)


def _has_bytes(text: str) -> bool:
    return any("\udc80" <= letter <= "\udcff" for letter in text)
