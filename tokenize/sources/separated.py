"""CSV and TSV: one document per row, with the text in a column that the first row names.

Commas separate values, or tabs if the file's name says so. If the first row lacks the columns with
that separator, but has them with another (comma, tab, semicolon or bar), that one is used.

A quoted value may contain line breaks, so no offset inside a file is certain to lie between rows: a
file is one slice.
"""

from __future__ import annotations

import csv
import itertools
import posixpath
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..files.input_file import DamagedFile, File
from ..files.open_file import read_decompressed
from .columns import column_problem, document_columns
from .delimited import BOM
from .fields import FieldKind, FieldProblem, build_table, parse_csv_value
from .format import LIMITS, BadRecord, CorpusFormat, ReadLimits, Slice, SourceConfig, Texts

UNIT = "row"
TAB_ENDINGS = ("tsv", "tab")
"""Endings of files with tabs between values; all others have commas."""
SEPARATORS = (",", "\t", ";", "|")
"""Separators to try if the default one does not give the columns."""


class Separated(CorpusFormat):
    """Rows of values; the first row names the columns."""

    endings = ("csv", *TAB_ENDINGS)
    settings = ("text_field", "id_field", "keep")

    def cut(self, file: File, config: SourceConfig, size: int) -> list[Slice]:
        return [Slice(file, 0, file.size, 0, file.size)]

    def read(
        self, file_slice: Slice, config: SourceConfig, limits: ReadLimits = LIMITS
    ) -> Iterator[Texts]:
        name = file_slice.file.name
        lines = _Lines(file_slice.file, limits)
        csv.field_size_limit(limits.document_bytes)  # of the process; each reader sets the same
        required = [field.name for field in config.keep if not field.optional]
        required = [*document_columns(config, ()), *required]
        number = -1  # of the row before the first one, which names the columns
        try:
            rows = _read_rows(lines, name, lambda header: set(required) <= set(header))
            header = next(rows, None)
            if header is None:
                return
            optional = [field.name for field in config.keep if field.optional]
            expected = [*required, *(column for column in optional if column in header)]
            if (message := column_problem(header, expected)) is not None:
                yield Texts([], [], None, [BadRecord("other schema", message, name)], lines.take())
                return
            block = _RowBlock(header, config, limits, name)
            while True:
                try:
                    row = next(rows, None)
                except csv.Error as error:
                    number += 1
                    block.reject(number, *_describe_error(error, limits))
                    continue
                if row is None:
                    break
                if not row:  # a blank line
                    continue
                number += 1
                block.add(number, row, lines.pop_invalid())
                if block.size >= limits.block_bytes:
                    yield block.take(lines.take())
            yield block.take(lines.take())
        except csv.Error as error:
            kind, message = _describe_error(error, limits)
            yield Texts([], [], None, [BadRecord(kind, message, name)], lines.take())
        except DamagedFile as error:
            problem = BadRecord("damaged file", str(error), name, number + 1, UNIT)
            if number >= 0:
                yield block.take(lines.take())
            yield Texts([], [], None, [problem])

    def field_kinds(
        self, file_slice: Slice, names: Sequence[str]
    ) -> dict[str, set[FieldKind | str]]:
        def has_one(header: list[str]) -> bool:
            return not set(names).isdisjoint(header)

        rows = _read_rows(_Lines(file_slice.file, LIMITS), file_slice.file.name, has_one)
        header = next(rows, [])
        return {name: {"string"} for name in names if name in header}


FORMAT = Separated()


class _RowBlock:
    """Collects documents from consecutive rows."""

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

    def add(self, number: int, row: list[str], not_utf8: bool) -> None:
        if len(row) != self.width:
            message = f"{len(row)} values in a row; the first row names {self.width} columns"
            self.reject(number, "broken CSV", message)
            return
        text, id = row[self.text], None if self.id is None else row[self.id]
        kept_values = ["" if column is None else row[column] for column, _ in self.keep]
        if not_utf8 and _has_surrogates("".join([text, id or "", *kept_values])):
            self.reject(number, "invalid UTF-8", "bytes of the row are not UTF-8")
            return
        max_bytes = self.limits.document_bytes
        if 4 * len(text) > max_bytes and len(text.encode()) > max_bytes:
            self.reject(number, *self.limits.too_large)
            return
        try:
            fields = [
                parse_csv_value(value, field)
                for value, (_, field) in zip(kept_values, self.keep, strict=True)
            ]
        except FieldProblem as problem:
            self.reject(number, problem.kind, str(problem))
            return
        self.fields.append(fields)
        self.size += len(text)
        self.texts.append(text)
        self.positions.append(number)
        self.ids.append(id or None)

    def reject(self, number: int, kind: str, message: str) -> None:
        self.problems.append(BadRecord(kind, message, self.name, number, UNIT))

    def take(self, read: int) -> Texts:
        """Return the collected documents and start anew; `read` bytes were read from the file."""
        ids = None if self.id is None else self.ids
        fields = None
        if self.keep:
            fields = build_table(self.fields, [field for _, field in self.keep])
        texts = Texts(self.texts, self.positions, ids, self.problems, read, fields)
        self._clear()
        return texts


class _Lines:
    """A file's lines, for csv.reader. Bytes that are not UTF-8 become lone surrogates."""

    def __init__(self, file: File, limits: ReadLimits) -> None:
        self._read = 0
        self._has_invalid = False
        self._lines = self._split(file, 2 * limits.document_bytes)

    def __iter__(self) -> _Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        try:
            return line.decode()
        except UnicodeDecodeError:
            self._has_invalid = True
            return line.decode(errors="surrogateescape")

    def take(self) -> int:
        """Return the bytes read from the file since the last call."""
        read, self._read = self._read, 0
        return read

    def pop_invalid(self) -> bool:
        """Return True if a line since the last call has bytes that are not UTF-8."""
        has_invalid, self._has_invalid = self._has_invalid, False
        return has_invalid

    def _split(self, file: File, max_bytes: int) -> Iterator[bytes]:
        """Yield lines. A line with more than `max_bytes` is cut: csv.reader accepts less."""
        bom_removed, carry = False, b""
        for chunk, read in read_decompressed(file):
            self._read += read
            data = carry + chunk
            if not bom_removed:
                bom_removed, data = True, data.removeprefix(BOM)
            *lines, carry = data.split(b"\n")
            yield from (line + b"\n" for line in lines)
            if len(carry) > max_bytes:
                yield carry
                carry = b""
        if carry:
            yield carry


def _read_rows(
    lines: Iterator[str], name: str, has_columns: Callable[[list[str]], bool]
) -> Iterator[list[str]]:
    """Read a file's rows with the separator that gives the columns in the first line; if none does,
    with the one that gives the most columns."""
    endings = posixpath.basename(name).lower().split(".")
    default_separator = "\t" if any(ending in TAB_ENDINGS for ending in endings[-2:]) else ","
    first = next(lines, None)
    if first is None:
        return iter(())

    def rank(separator: str) -> tuple[bool, int]:
        try:
            header = next(csv.reader([first], delimiter=separator))
        except csv.Error:
            return False, 0
        return has_columns(header), len(header)

    ranks = {
        separator: rank(separator) for separator in dict.fromkeys([default_separator, *SEPARATORS])
    }
    has_default = ranks[default_separator][0]
    separator = default_separator if has_default else max(ranks, key=lambda tried: ranks[tried])
    return csv.reader(itertools.chain([first], lines), delimiter=separator, strict=True)


def _describe_error(error: csv.Error, limits: ReadLimits) -> tuple[str, str]:
    """Return a bad record's kind and message for an error from csv.reader."""
    if "limit" in str(error):
        limit = limits.document_bytes >> 20
        return "too large", f"a value of more than {limit} MiB, or a quote that is never closed"
    return "broken CSV", str(error)


def _has_surrogates(text: str) -> bool:
    return any("\udc80" <= letter <= "\udcff" for letter in text)
