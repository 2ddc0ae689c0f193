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
from .open_file import compression_of, decompressed, read_full

log = get_logger(__name__)

WORDS = ("-", "/dev/stdin")
"""What stands for standard input on the command line."""
NAME = "standard input"
FOLDER = "stdin"
"""Folder in the work folder of a build."""
BEGINNINGS = {
    "parquet": (b"PAR1",),
    "arrow": (b"ARROW1", b"\xff\xff\xff\xff"),
    "warc": (b"WARC/",),
    "jsonl": (b"{",),
    "fasta": (b">",),
}
"""First bytes of formats whose files begin like no others."""

_folders: list[tempfile.TemporaryDirectory[str]] = []
"""Folders that end with this process."""


def not_read_yet(format: str) -> File:
    """Return the file that stands for standard input until it is kept."""
    return File(NAME, 0, format, None, fingerprint="", path="-")


def keep(files: Sequence[File], folder: str | None) -> list[File]:
    """Return the files with the one that stands for standard input replaced by its bytes, which are
    kept in a local folder; None: in one that ends with this process."""
    return [_kept(file, folder) if file.path == "-" else file for file in files]


def _kept(file: File, folder: str | None) -> File:
    stream: BinaryIO = sys.stdin.buffer
    if sys.stdin.isatty():
        raise InputError(
            "standard input is a terminal", hint="pipe a corpus into it, as in: zcat a.gz | …"
        )
    if folder is None:
        _folders.append(tempfile.TemporaryDirectory(prefix="headrace-stdin-"))
        folder = _folders[-1].name
    place = storage.local_path(folder)
    try:
        place.mkdir(parents=True, exist_ok=True)
        path, content = _copy(stream, place)
    except OSError as error:
        reason, hint = file_fault(error)
        raise StorageError(f"cannot keep standard input in {folder}: {reason}", hint=hint) from None
    with path.open("rb") as held:
        compression = compression_of(held)
    kept = File(
        name=f"{NAME} {content.fingerprint[:8]}",
        size=path.stat().st_size,
        format=file.format,
        compression=compression,
        fingerprint=content.fingerprint,
        path=str(path),
        checksums=content.checksums,
    )
    if kept.format != "auto":
        return kept
    try:
        return _of_its_format(kept)
    except InputError:
        path.unlink()
        raise


def _copy(stream: BinaryIO, folder: Path) -> tuple[Path, ContentHash]:
    """Copy a stream into a file that is named by its hash; return its path and its hash."""
    handle, half = tempfile.mkstemp(dir=folder)
    with os.fdopen(handle, "wb") as out, Progress("reading standard input", unit="B") as progress:

        def copy_blocks() -> Iterator[bytes]:
            while block := read_full(stream, MIN_BLOCK_BYTES):
                out.write(block)
                progress.advance(len(block))
                yield block

        content = hash_content(copy_blocks(), MIN_BLOCK_BYTES)
    return Path(half).rename(folder / content.fingerprint), content


def _of_its_format(file: File) -> File:
    """Return a file with the format that its first bytes show."""
    head = next(decompressed(file), (b"", 0))[0].removeprefix(b"\xef\xbb\xbf").lstrip()
    for format, beginnings in BEGINNINGS.items():
        if head.startswith(beginnings):
            log.info("standard input is read as %s", format)
            return replace(file, format=format)
    raise InputError(
        "the format of standard input is not known" if head else "standard input is empty",
        hint="name it with --input-format, as in --input-format text" if head else None,
    )
