"""One file of a corpus, and the error that says it is damaged."""

from __future__ import annotations

from dataclasses import dataclass

from .checksums import BlockChecksums

COMPRESSIONS = {
    "gz": "gzip",
    "gzip": "gzip",
    "zst": "zstd",
    "zstd": "zstd",
    "xz": "xz",
    "bz2": "bzip2",
}
"""Compression by file ending."""

BLOCK_BYTES = 4 << 20
"""Bytes read, decompressed and tokenized at once."""


def is_web(name: str) -> bool:
    """Return True for the URL of a file on a web server."""
    return name.startswith(("http://", "https://"))


@dataclass(frozen=True)
class File:
    """A file of a corpus. Ids of build tasks hash these fields, except the last two: do not rename
    them."""

    name: str
    """URL or path, as the user gave it; datasets store it as the origin of documents."""
    size: int
    format: str
    compression: str | None
    fingerprint: str
    """Name of the content (see file_hashes.py); empty until it is computed."""
    path: str | None = None
    """Path of the bytes, if they lie elsewhere (standard_input.py)."""
    checksums: BlockChecksums | None = None
    """Checksums of the hashed content; None if it was not read."""

    @property
    def place(self) -> str:
        """URL or path to open."""
        return self.name if self.path is None else self.path


class DamagedFile(Exception):
    """A file is truncated, or has another format than its name says."""
