"""WARC and WET: one document per plain-text record.

A record is a header block, an empty line, as many bytes as its headers say, and two line breaks.
Common Crawl's WET files hold page texts as records with type `conversion`. A WARC file holds web
servers' responses: another program must extract their text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..files.input_file import DamagedFile, File
from ..files.open_file import read_decompressed
from .format import LIMITS, BadRecord, CorpusFormat, ReadLimits, Slice, SourceConfig, Texts

UNIT = "record"
TEXT_TYPES = ("conversion", "resource")
"""Record types that may contain a text."""
ID = "WARC-Target-URI"
"""Header with a document's id, unless `id_field` names another header."""
MAX_HEAD_BYTES = 1 << 20
"""Upper bound on a record's headers; a file with longer ones is no WARC file."""
END = b"\r\n\r\n"


class Warc(CorpusFormat):
    """Web-archive records whose content is plain text."""

    endings = ("wet", "warc")
    has_ids = True
    settings = ("id_field",)

    def cut(self, file: File, config: SourceConfig, size: int) -> list[Slice]:
        return [Slice(file, 0, file.size, 0, file.size)]

    def read(
        self, file_slice: Slice, config: SourceConfig, limits: ReadLimits = LIMITS
    ) -> Iterator[Texts]:
        name = file_slice.file.name
        stream = _Stream(file_slice.file, limits)
        number = 0
        texts: list[str] = []
        positions: list[int] = []
        ids: list[str | None] = []
        problems: list[BadRecord] = []
        size = 0
        damage: BadRecord | None = None
        while True:
            try:
                record = stream.record()
            except DamagedFile as error:
                damage = BadRecord("damaged file", str(error), name, number, UNIT)
                break
            if record is None:
                break
            if (problem := record.problem(limits)) is not None:
                problems.append(BadRecord(*problem, name, number, UNIT))
            elif record.type in TEXT_TYPES:
                try:
                    texts.append(record.content.decode())
                    positions.append(number)
                    ids.append(record.header(config.id_field or ID))
                except UnicodeDecodeError as error:
                    message = f"at byte {error.start} of the content"
                    problems.append(BadRecord("invalid UTF-8", message, name, number, UNIT))
            number += 1
            size += len(record.content)
            if size >= limits.block_bytes:
                yield Texts(texts, positions, ids, problems, stream.take())
                texts, positions, ids, problems, size = [], [], [], [], 0
        problems += [damage] if damage is not None else []
        yield Texts(texts, positions, ids, problems, stream.take())


FORMAT = Warc()


@dataclass(frozen=True)
class _Record:
    headers: dict[str, str]
    """Values by lower-case name."""
    content: bytes
    """Empty if the record is no text, or too large."""
    length: int

    @property
    def type(self) -> str:
        return self.headers.get("warc-type", "")

    def header(self, name: str) -> str | None:
        return self.headers.get(name.lower()) or None

    def problem(self, limits: ReadLimits) -> tuple[str, str] | None:
        """Return kind and message if this record is a bad one, else None."""
        if self.type == "response":
            return (
                "not text",
                "a `response` of a web server, whose text is not extracted",
            )
        if self.type not in TEXT_TYPES:
            return None
        kind = self.headers.get("content-type", "no type").partition(";")[0].strip().lower()
        if kind != "text/plain":
            return "not text", f"its content is {kind}, not text/plain"
        if self.length > limits.document_bytes:
            return limits.too_large
        return None


class _Stream:
    """Reads a file record by record."""

    def __init__(self, file: File, limits: ReadLimits) -> None:
        self._blocks = read_decompressed(file)
        self._limits = limits
        self._data = b""
        self._position = 0
        self._read = 0

    def take(self) -> int:
        """Return the bytes read from the file since the last call."""
        read, self._read = self._read, 0
        return read

    def record(self) -> _Record | None:
        """Return the next record, or None at the file's end."""
        if not self._fill(1):
            return None
        headers = self._headers()
        try:
            length = int(headers["content-length"])
            if length < 0:
                raise ValueError
        except (KeyError, ValueError):
            raise DamagedFile("a record without a valid Content-Length") from None
        small = length <= self._limits.document_bytes
        keep = small and headers.get("warc-type") in TEXT_TYPES
        content = self._content(length, keep=keep)
        if not self._fill(len(END)) or self._next(len(END)) != END:
            raise DamagedFile("a record does not end with two line breaks")
        return _Record(headers, content, length)

    def _headers(self) -> dict[str, str]:
        size = 4096
        while (end := self._data.find(END, self._position)) < 0:
            size *= 2
            if not self._fill(size) and self._data.find(END, self._position) < 0:
                raise DamagedFile("the headers of a record are cut off")
            if size > MAX_HEAD_BYTES:
                raise DamagedFile("this is no WARC file: it has no headers of a record")
        head = self._next(end + len(END) - self._position).decode(errors="replace")
        first, *lines = head.rstrip("\r\n").split("\r\n")
        if not first.startswith("WARC/"):
            raise DamagedFile(f"a record begins with {first[:20]!r}, not with WARC/ and a version")
        pairs = (line.partition(":") for line in lines)
        return {name.strip().lower(): value.strip() for name, _, value in pairs}

    def _content(self, length: int, *, keep: bool) -> bytes:
        blocks = []
        while length:
            if not self._fill(1):
                raise DamagedFile("the content of a record is cut off")
            block = self._next(min(length, len(self._data) - self._position))
            length -= len(block)
            if keep:
                blocks.append(block)
        return b"".join(blocks)

    def _fill(self, size: int) -> bool:
        """Read until `size` bytes are buffered; return False if the file ends before."""
        while len(self._data) - self._position < size:
            block, read = next(self._blocks, (b"", 0))
            if not block:
                return False
            self._read += read
            self._data = self._data[self._position :] + block
            self._position = 0
        return True

    def _next(self, size: int) -> bytes:
        data = self._data[self._position : self._position + size]
        self._position += size
        return data
