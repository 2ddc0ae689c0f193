"""Lines of a file, plain or compressed with gzip."""

from __future__ import annotations

import contextlib
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

from ....console.errors import InputError, StorageError, file_fault

GZIP = b"\x1f\x8b"
"""First bytes of a compressed file."""


@contextlib.contextmanager
def naming_faults(path: str) -> Iterator[None]:
    """Raise the errors of reading a file as errors that name it."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is damaged: {error}", hint="fetch it again") from None
    except OSError as error:
        reason, hint = file_fault(error)
        raise StorageError(f"cannot read {path}: {reason}", hint=hint) from None


def read_lines(path: str) -> Iterator[bytes]:
    """Yield the lines with their ends."""
    with naming_faults(path), Path(path).open("rb") as file:
        packed = file.read(len(GZIP)) == GZIP
        file.seek(0)
        if not packed:
            yield from file
            return
        with gzip.open(file) as unpacked:
            yield from unpacked
