"""The tables of a plan as a file on this host: computed once, and mapped by all processes.

    <plan's hash>.tables     sha256 of everything that follows, header size, header, arrays
    <plan's hash>.lock       held by the process that computes the tables

The file appears by one rename. Every process verifies it; a damaged file is computed and written
again. The lock ends with its process. Without a writable folder, every process computes its own
tables.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol, TypeVar

import numpy as np

from ...console.log import get_logger
from ..arrays import Bytes
from ..storage import host_files
from .tables import Array

log = get_logger(__name__)

ALIGNMENT = 64
DIGEST_BYTES = 32
HEAD = struct.Struct(f"<{DIGEST_BYTES}sQ")


class Arrays(Protocol):
    """A dataclass of arrays."""

    @property
    def arrays(self) -> Mapping[str, Array]: ...


A = TypeVar("A", bound=Arrays)


class _DamagedError(Exception):
    """The file does not hold what was written."""


def load_tables(name: str, compute: Callable[[], A], kind: Callable[..., A]) -> A:
    """Map the tables of the plan with the hash `name`; computes and writes them if necessary.

    `kind` builds them from arrays.
    """
    file = host_files.folder() / f"{name}.tables"
    tables = _open(file, kind)
    if tables is not None:
        return tables
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file.with_suffix(".lock")):
            tables = _open(file, kind)  # another process may have just written it
            if tables is None:
                tables = compute()
                _write(file, tables)
                tables = _open(file, kind) or tables
            return tables
    except OSError as error:
        log.warning("cannot keep the order of the plan in %s: %s", file, error.strerror or error)
    return tables or compute()


def _open(file: Path, kind: Callable[..., A]) -> A | None:
    """Map and verify a file; None if it is missing or damaged."""
    try:
        return kind(**_parse(host_files.map_shared(file)))
    except OSError:
        return None
    except _DamagedError:
        log.warning("%s is damaged: computing it again", file)
        return None


def _parse(data: Bytes) -> dict[str, Array]:
    if len(data) < HEAD.size:
        raise _DamagedError
    digest, header_bytes = HEAD.unpack(data[: HEAD.size].tobytes())
    if hashlib.sha256(data[DIGEST_BYTES:].data).digest() != digest:
        raise _DamagedError
    arrays = {}
    for name, dtype, shape, start in json.loads(data[HEAD.size :][:header_bytes].tobytes()):
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays[name] = data[start : start + size].view(dtype).reshape(shape)
    return arrays


def _write(file: Path, tables: Arrays) -> None:
    arrays = {name: np.ascontiguousarray(array) for name, array in tables.arrays.items()}
    # The offsets depend on the header's size, which depends on their digits: reserve a fixed size.
    start = first_offset = HEAD.size + 4096
    entries = []
    for name, array in arrays.items():
        start += -start % ALIGNMENT
        entries.append((name, array.dtype.str, array.shape, start))
        start += array.nbytes
    header = json.dumps(entries).encode()
    assert HEAD.size + len(header) <= first_offset
    data = bytearray(start)
    data[HEAD.size : HEAD.size + len(header)] = header
    for (_, _, _, offset), array in zip(entries, arrays.values(), strict=True):
        data[offset : offset + array.nbytes] = array.reshape(-1).view(np.uint8).data
    data[DIGEST_BYTES : HEAD.size] = struct.pack("<Q", len(header))
    data[:DIGEST_BYTES] = hashlib.sha256(memoryview(data)[DIGEST_BYTES:]).digest()
    host_files.write(file, data)


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold a lock. On a file system without locks, two processes may compute the same tables; the
    file is still written whole."""
    with file.open("ab") as lock:
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
