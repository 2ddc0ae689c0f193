"""Standard input as a file of a corpus: `zcat a.jsonl.gz | jq … | tokenize build - --out data/web`.

A pipe can be read once, and a build reads its inputs several times: it hashes them, cuts them into
tasks, and a task that was killed reads its slice again. So the bytes are kept in a file, named by
their hash, until the build ends: in its work folder, or, where that is not on this machine, in a
folder of this process. The same bytes are the same input, however they came.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from ...console.errors import InputError, StorageError, file_fault
from ...console.log import get_logger
from ...console.progress import Progress
from ...dataplane.storage import storage
from .checksums import MIN_BLOCK_BYTES, ContentHash, hash_content
from .input_file import File
from .open_file import detect_compression, read_decompressed, read_full

log = get_logger(__name__)

ARGUMENTS = ("-", "/dev/stdin")
"""Command-line arguments for standard input."""
NAME = "standard input"
FOLDER = "stdin"
"""Folder in a build's work folder."""
SIGNATURES = {
    "parquet": (b"PAR1",),
    "arrow": (b"ARROW1", b"\xff\xff\xff\xff"),
    "warc": (b"WARC/",),
    "jsonl": (b"{",),
    "fasta": (b">",),
}
"""First bytes by which formats can be recognized."""

_folders: list[tempfile.TemporaryDirectory[str]] = []
"""Folders removed when this process ends."""


def make_placeholder(format: str) -> File:
    """Return the file that stands for standard input until it is stored."""
    return File(NAME, 0, format, None, fingerprint="", path="-")


def store(files: Sequence[File], folder: str | None) -> list[File]:
    """Return the files with the one that stands for standard input replaced by its bytes, which are
    kept in a local folder; None: in one that ends with this process."""
    return [_store_file(file, folder) if file.path == "-" else file for file in files]


def _store_file(file: File, folder: str | None) -> File:
    stream: BinaryIO = sys.stdin.buffer
    if sys.stdin.isatty():
        raise InputError(
            "standard input is a terminal", hint="pipe a corpus into it, as in: zcat a.gz | …"
        )
    if folder is None:
        _folders.append(tempfile.TemporaryDirectory(prefix="headrace-stdin-"))
        folder = _folders[-1].name
    local_folder = storage.local_path(folder)
    try:
        local_folder.mkdir(parents=True, exist_ok=True)
        path, content = _copy(stream, local_folder)
    except OSError as error:
        reason, hint = file_fault(error)
        raise StorageError(f"cannot keep standard input in {folder}: {reason}", hint=hint) from None
    with path.open("rb") as stream:
        compression = detect_compression(stream)
    stored_file = File(
        name=f"{NAME} {content.fingerprint[:8]}",
        size=path.stat().st_size,
        format=file.format,
        compression=compression,
        fingerprint=content.fingerprint,
        path=str(path),
        checksums=content.checksums,
    )
    if stored_file.format != "auto":
        return stored_file
    try:
        return _detect_format(stored_file)
    except InputError:
        path.unlink()
        raise


def _copy(stream: BinaryIO, folder: Path) -> tuple[Path, ContentHash]:
    """Copy a stream into a file named by its hash; return path and hash."""
    handle, partial_path = tempfile.mkstemp(dir=folder)
    with os.fdopen(handle, "wb") as out, Progress("reading standard input", unit="B") as progress:

        def copy_blocks() -> Iterator[bytes]:
            while block := read_full(stream, MIN_BLOCK_BYTES):
                out.write(block)
                progress.advance(len(block))
                yield block

        content = hash_content(copy_blocks(), MIN_BLOCK_BYTES)
    return Path(partial_path).rename(folder / content.fingerprint), content


def _detect_format(file: File) -> File:
    """Set a file's format by its first bytes; raise InputError if they show none."""
    head = next(read_decompressed(file), (b"", 0))[0].removeprefix(b"\xef\xbb\xbf").lstrip()
    for format, beginnings in SIGNATURES.items():
        if head.startswith(beginnings):
            log.info("standard input is read as %s", format)
            return replace(file, format=format)
    raise InputError(
        "the format of standard input is not known" if head else "standard input is empty",
        hint="name it with --input-format, as in --input-format text" if head else None,
    )
