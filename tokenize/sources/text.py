"""Plain text: one document per file, per line, or between two separators."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...dataplane.tokenizers import Raw
from ..files.input_file import DamagedFile, File
from ..files.open_file import read_decompressed
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
"""Endings for prose and source code. Tables (.csv) and configurations (.yaml, .toml, .xml) are
neither; .json is read as JSON lines."""


class Text(CorpusFormat):
    """Plain text; `text_documents` chooses a document's unit."""

    endings = (*PROSE, *CODE)
    settings = ("text_documents",)

    def cut(self, file: File, config: SourceConfig, size: int) -> list[Slice]:
        if config.text_documents == "file":
            return [Slice(file, 0, file.size, 0, file.size)]
        return cut_bytes(file, _delimiter(config), size)

    def read(
        self, file_slice: Slice, config: SourceConfig, limits: ReadLimits = LIMITS
    ) -> Iterator[Texts]:
        if config.text_documents == "file":
            yield from _file_documents(file_slice.file, config, limits)
            return
        delimiter = _delimiter(config)
        unit = "line" if config.text_documents == "line" else "document"
        split = config.split_large
        for block in record_blocks(file_slice, delimiter, limits, unit=unit, split=split):
            yield _block_texts(block, delimiter, file_slice.file.name, unit)


FORMAT = Text()


def _delimiter(config: SourceConfig) -> bytes:
    return b"\n" if config.text_documents == "line" else config.separator.encode()


def _block_texts(block: RecordBlock, delimiter: bytes, name: str, unit: str) -> Texts:
    problems = [] if block.problem is None else [block.problem]
    if not block.records:
        return Texts([], [], None, problems, block.read)
    numbers = range(block.first, block.first + block.records)
    raw = _raw_lines(block) if delimiter == b"\n" else None
    if raw is not None:
        return Texts(raw, numbers, None, problems, block.read)
    try:
        texts = block.data.decode().split(delimiter.decode())
        positions = list(numbers)
    except UnicodeDecodeError:
        texts, positions = [], []
        for position, data in zip(numbers, block.data.split(delimiter), strict=True):
            try:
                texts.append(data.decode())
                positions.append(position)
            except UnicodeDecodeError as error:
                message = f"at byte {error.start} of the {unit}"
                problems.append(BadRecord("invalid UTF-8", message, name, position, unit))
    if delimiter == b"\n" and b"\r" in block.data:
        texts = [text.removesuffix("\r") for text in texts]
    if delimiter == b"\n" and "" in texts:
        # A blank line is not a document, as in JSON lines.
        pairs = [(text, position) for text, position in zip(texts, positions, strict=True) if text]
        texts, positions = [text for text, _ in pairs], [position for _, position in pairs]
    return Texts(texts, positions, None, problems, block.read)


def _raw_lines(block: RecordBlock) -> Raw | None:
    """Return a block's lines without copying, or None if a line needs changes."""
    if b"\r" in block.data or not is_utf8(block.data):
        return None
    data = block.data + b"\n"
    ends = np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")) + 1
    if ends[0] == 1 or (len(ends) > 1 and np.diff(ends).min() == 1):
        return None  # a blank line
    return Raw(data, ends)


def _file_documents(file: File, config: SourceConfig, limits: ReadLimits) -> Iterator[Texts]:
    """Read a file as one document, or in pieces if it is too large and `split_large` is set."""
    data = b""
    unreported = 0  # bytes read since the last result
    bom_removed = False
    try:
        for chunk, read in read_decompressed(file):
            data += chunk
            unreported += read
            if not bom_removed and len(data) >= len(BOM):
                data, bom_removed = data.removeprefix(BOM), True
            if len(data) > limits.document_bytes:
                if not config.split_large:
                    problem = BadRecord(*limits.too_large, file.name)
                    yield Texts([], [], None, [problem], file.size)
                    return
                piece = first_piece(data, limits)
                data = data[len(piece) :]
                yield _whole_document(piece, file.name, unreported)
                unreported = 0
            elif len(data) > len(chunk):
                yield Texts([], [], size=unreported)
                unreported = 0
    except DamagedFile as error:
        yield Texts([], [], None, [BadRecord("damaged file", str(error), file.name)], unreported)
        return
    yield _whole_document(data, file.name, unreported)


def _whole_document(data: bytes, name: str, read: int) -> Texts:
    try:
        return Texts([data.decode()], [0], size=read)
    except UnicodeDecodeError as error:
        message = f"at byte {error.start} of the file"
        return Texts([], [], None, [BadRecord("invalid UTF-8", message, name)], read)
