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
"""Compression by the ending of a file's name."""

BLOCK_BYTES = 4 << 20
"""Bytes read, decompressed and tokenized at once."""


@dataclass(frozen=True)
class File:
    """One file of a corpus. The ids of build tasks hash these fields, but for the last two: do not
    rename them."""

    name: str
    """URL or path, as the user gave it; datasets store it as the origin of documents."""
    size: int
    format: str
    compression: str | None
    fingerprint: str
    """Name of the content (see file_hashes.py); empty until it is computed."""
    path: str | None = None
    """Path of its bytes, if they lie elsewhere (see standard_input.py)."""
    checksums: BlockChecksums | None = None
    """Checksums of the content that was hashed; None: it was not read."""

    @property
    def place(self) -> str:
        """URL or path that is opened."""
        return self.name if self.path is None else self.path


class DamagedFile(Exception):
    """A file is truncated, or is not of the format that its name says."""
