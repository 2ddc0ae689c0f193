"""Corpora, found by name: each kind of file is cut into slices, and a slice is read as documents.

A slice is what one task reads: a range of bytes, of row groups or of record batches. How a file
is cut depends on the file alone, so that a build has the same tasks on any machine.

To add one: write a file beside this one, and add it to SOURCES (and its endings to ENDINGS).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Literal, Protocol

from ...console.errors import InputError, MisuseError

SOURCES = {
    "jsonl": "headrace.tokenize.sources.jsonl",
    "parquet": "headrace.tokenize.sources.parquet",
    "arrow": "headrace.tokenize.sources.arrow",
    "text": "headrace.tokenize.sources.text",
    "fasta": "headrace.tokenize.sources.fasta",
}

ENDINGS = {
    **dict.fromkeys(("jsonl", "ndjson", "json"), "jsonl"),
    **dict.fromkeys(("parquet", "pq"), "parquet"),
    **dict.fromkeys(("arrow", "feather", "ipc"), "arrow"),
    **dict.fromkeys(("txt", "text", "md"), "text"),
    **dict.fromkeys(("fasta", "fa", "fna", "ffn", "faa", "frn"), "fasta"),
}
COMPRESSIONS = {"gz": "gzip", "gzip": "gzip", "zst": "zstd", "zstd": "zstd"}

BLOCK_BYTES = 4 << 20
"""What is read, and handed to the tokenizer, at once."""
LARGEST_DOCUMENT = 32 << 20
"""Bytes of text. A worker holds a document several times (text, of which a single emoji makes four
times as much; ids; the shard it goes into), and its memory must stay below 1 GiB."""


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    format: Literal["auto", "jsonl", "parquet", "arrow", "text", "fasta"] = "auto"
    """What the files are; auto goes by their endings."""
    text_field: str = "text"
    """The field or column that holds the text."""
    id_field: str | None = None
    """The field or column that holds the corpus' own id of a document."""
    text_documents: Literal["file", "line", "separator"] = "file"
    """What one document of a plain text is."""
    separator: str = "\n\n"
    """What separates the documents of a plain text, where `text_documents` is `separator`."""
    split_large: bool = False
    """Whether a text beyond the limit of memory is read in pieces, rather than refused."""

    def __post_init__(self) -> None:
        if not self.separator:
            raise ValueError("separator is empty")
        if self.separator != "\n\n" and self.text_documents != "separator":
            raise ValueError("separator needs text_documents: separator")


MEANT_FOR = {
    **dict.fromkeys(("text_field", "id_field"), ("jsonl", "parquet", "arrow")),
    "text_documents": ("text",),
}
"""Settings that mean nothing to other formats."""


def check_meant(config: SourceConfig, formats: Iterable[str]) -> None:
    """That each setting means something to one of the formats that a corpus has."""
    for name, meant in MEANT_FOR.items():
        if getattr(config, name) != getattr(SourceConfig(), name) and set(meant).isdisjoint(
            formats
        ):
            option = name.replace("_", "-")
            raise MisuseError(
                f"--{option} is for {', '.join(meant)}, and no input is one: they are "
                + ", ".join(sorted(formats)),
                hint=f"leave --{option} out, or say with --input-format what the inputs are",
            )


@dataclass(frozen=True)
class File:
    """One file of a corpus."""

    name: str
    """Its URL or path, as it was given."""
    size: int
    format: str
    compression: str | None
    fingerprint: str
    """Names its content (see fingerprints.py); empty as long as nobody has asked for it."""


@dataclass(frozen=True)
class Slice:
    """A part of a file, [start, end) in the source's own unit."""

    file: File
    start: int
    end: int
    first: int
    """The position of its first document in the file."""
    size: int
    """About how many bytes of the file it is."""


@dataclass(frozen=True)
class BadRecord:
    """A record that cannot be read."""

    kind: str
    what: str
    file: str
    position: int | None = None
    unit: str = "record"

    def where(self) -> str:
        if self.position is None:
            return self.file
        return f"{self.file}, {self.unit} {self.position + 1}"

    def __str__(self) -> str:
        return f"{self.where()}: {self.kind}: {self.what}"


@dataclass(frozen=True)
class Texts:
    """Documents read, in the order of their file."""

    texts: Sequence[str]
    positions: Sequence[int]
    ids: list[str | None] | None = None
    problems: list[BadRecord] = field(default_factory=list)
    size: int = 0
    """Bytes of the file that were read for them."""


class Broken(Exception):
    """A file that ends before its time, or is not what its name says."""


class CorpusFormat(Protocol):
    """What each module of this folder provides."""

    def cut(self, file: File, config: SourceConfig, size: int) -> list[Slice]:
        """The slices of a file, each of about `size` bytes; Broken, if it has none."""
        ...

    def read(self, part: Slice, config: SourceConfig) -> Iterator[Texts]:
        """The documents of a slice. What cannot be read is a Problem among them."""
        ...


def source(name: str) -> CorpusFormat:
    """The source called `name`."""
    if name not in SOURCES:
        raise InputError(f"there is no source `{name}`", hint=f"known: {', '.join(SOURCES)}")
    module: CorpusFormat = import_module(SOURCES[name])
    return module


def cut(file: File, config: SourceConfig, size: int, *, skip_bad: bool) -> list[Slice]:
    """The slices of a file. One that is broken is an error, or a slice that says so when read."""
    try:
        return source(file.format).cut(file, config, size)
    except Broken as error:
        if skip_bad:
            return [Slice(file, 0, 0, 0, file.size)]
        raise InputError(
            f"damaged file: {error}",
            where=file.name,
            hint="fix the file, or leave such files out with --on-error skip",
        ) from None
