"""Plain text: one document per file, per line, or between two separators."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...dataplane.tokenizers import Raw
from ..files.input_file import DamagedFile, File
from ..files.open_file import decompressed
from .delimited import BOM, RecordBlock, cut_bytes, first_piece, is_utf8, record_blocks
from .format import LIMITS, BadRecord, CorpusFormat, ReadLimits, Slice, SourceConfig, Texts

PROSE = (
    *("txt", "text", "md", "markdown", "mdx", "rst", "org", "adoc", "asciidoc", "textile"),
    *("tex", "ltx", "bib", "html", "htm", "xhtml", "srt", "vtt"),
)
CODE = (
    *("py", "pyi", "pyx", "rb", "pl", "pm", "php", "lua", "tcl", "r", "jl", "m"),
    *("c", "h", "cc", "cpp", "cxx", "hh", "hpp", "hxx", "cu", "cuh", "cl", "s", "asm"),
    *("rs", "go", "zig", "d", "nim", "swift", "mm", "java", "kt", "kts", "scala", "groovy"),
    *("cs", "fs", "fsx", "vb", "js", "mjs", "cjs", "jsx", "ts", "tsx", "vue", "svelte", "dart"),
    *("hs", "ml", "mli", "ex", "exs", "erl", "hrl", "clj", "lisp", "el", "scm", "rkt", "v", "lean"),
    *("f", "f90", "f95", "f03", "for", "pas", "ada", "adb", "ads", "cob", "vhd", "vhdl", "sv"),
    *("sh", "bash", "zsh", "fish", "ps1", "bat", "awk", "sql", "css", "scss", "sass", "less"),
    *("cmake", "mk", "gradle", "bzl", "proto", "thrift", "graphql", "tf", "nix", "glsl", "wgsl"),
)
"""Endings of prose and of source code. Tables (.csv) and configurations (.yaml, .toml, .xml) are
neither, and .json is read as JSON lines."""


class Text(CorpusFormat):
    """Plain text; `text_documents` says what one document is."""

    endings = (*PROSE, *CODE)
    settings = ("text_documents",)

    def cut(self, file: File, config: SourceConfig, size: int) -> list[Slice]:
        if config.text_documents == "file":
            return [Slice(file, 0, file.size, 0, file.size)]
        return cut_bytes(file, _delimiter(config), size)

    def read(
        self, part: Slice, config: SourceConfig, limits: ReadLimits = LIMITS
    ) -> Iterator[Texts]:
        if config.text_documents == "file":
            yield from _file_documents(part.file, config, limits)
            return
        delimiter = _delimiter(config)
        unit = "line" if config.text_documents == "line" else "document"
        split = config.split_large
        for block in record_blocks(part, delimiter, limits, unit=unit, split=split):
            yield _texts(block, delimiter, part.file.name, unit)


FORMAT = Text()


def _delimiter(config: SourceConfig) -> bytes:
    return b"\n" if config.text_documents == "line" else config.separator.encode()


def _texts(block: RecordBlock, delimiter: bytes, name: str, unit: str) -> Texts:
    problems = [] if block.problem is None else [block.problem]
    if not block.records:
        return Texts([], [], None, problems, block.read)
    numbers = range(block.first, block.first + block.records)
    raw = _raw(block) if delimiter == b"\n" else None
    if raw is not None:
        return Texts(raw, numbers, None, problems, block.read)
    try:
        texts = block.data.decode().split(delimiter.decode())
        kept = list(numbers)
    except UnicodeDecodeError:
        texts, kept = [], []
        for number, data in zip(numbers, block.data.split(delimiter), strict=True):
            try:
                texts.append(data.decode())
                kept.append(number)
            except UnicodeDecodeError as error:
                what = f"at byte {error.start} of the {unit}"
                problems.append(BadRecord("invalid UTF-8", what, name, number, unit))
    if delimiter == b"\n" and b"\r" in block.data:
        texts = [text.removesuffix("\r") for text in texts]
    if delimiter == b"\n" and "" in texts:
        # A blank line is not a document, as in JSON lines.
        pairs = [(text, number) for text, number in zip(texts, kept, strict=True) if text]
        texts, kept = [text for text, _ in pairs], [number for _, number in pairs]
    return Texts(texts, kept, None, problems, block.read)


def _raw(block: RecordBlock) -> Raw | None:
    """Return the lines of a block without copying, or None if a line needs changes."""
    if b"\r" in block.data or not is_utf8(block.data):
        return None
    data = block.data + b"\n"
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
    if ends[0] == 1 or (len(ends) > 1 and np.diff(ends).min() == 1):
        return None  # a blank line
    return Raw(data, ends)


def _file_documents(file: File, config: SourceConfig, limits: ReadLimits) -> Iterator[Texts]:
    """Read a file as one document; in pieces if it is too large and `split_large` is set."""
    data = b""
    unreported = 0  # bytes read since the last result
    begun = False
    try:
        for chunk, read in decompressed(file):
            data += chunk
            unreported += read
            if not begun and len(data) >= len(BOM):
                data, begun = data.removeprefix(BOM), True
            if len(data) > limits.document_bytes:
                if not config.split_large:
                    problem = BadRecord(*limits.too_large, file.name)
                    yield Texts([], [], None, [problem], file.size)
                    return
                piece = first_piece(data, limits)
                data = data[len(piece) :]
                yield _document(piece, file.name, unreported)
                unreported = 0
            elif len(data) > len(chunk):
                yield Texts([], [], size=unreported)
                unreported = 0
    except DamagedFile as error:
        yield Texts([], [], None, [BadRecord("damaged file", str(error), file.name)], unreported)
        return
    yield _document(data, file.name, unreported)


def _document(data: bytes, name: str, read: int) -> Texts:
    try:
        return Texts([data.decode()], [0], size=read)
    except UnicodeDecodeError as error:
        what = f"at byte {error.start} of the file"
        return Texts([], [], None, [BadRecord("invalid UTF-8", what, name)], read)
