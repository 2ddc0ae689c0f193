"""The folder of a cache: runs of chunks as files, bounded in bytes, shared by processes.

    folder/.headrace-cache        marks the folder as a cache, and holds its size in bytes
    folder/.headrace-turns        locked by the byte: chunks that are being fetched
    folder/.headrace-evictions    a byte longer after each eviction: readers unmap their chunks
    folder/.headrace-checked      files that were verified since the machine started
    folder/.headrace-used         when files were last used
    folder/<shard's hash>/<n>     chunk n of that shard
    folder/<shard's hash>/<n>-<m> its chunks [n, m), fetched by one request

A file appears by a rename: a killed process leaves no partial file, and readers need no lock.
Writers hold a lock (flock, which ends with the process) to keep the bound. Eviction order: files
that no prefetcher waits for, least recently used first; then those needed last. Nothing but chunks
is removed. A folder that is deleted while in use is created again.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ...console.errors import ConfigError, ConfigProblem, StorageError, file_fault
from ..arrays import Bytes
from ..storage.checked_files import CheckedFiles
from ..storage.last_uses import LastUses
from .chunks import Run, chunk_digests, chunks_per_file, group_runs, matches_digest
from .manifest import Shard

MARKER = ".headrace-cache"
LOCKS = ".headrace-turns"
EVICTIONS = ".headrace-evictions"
CHECKED = ".headrace-checked"
USED = ".headrace-used"
UNKNOWN = -1
"""Recorded size while the folder is being changed."""
SHARD_NAME = re.compile(r"[0-9a-f]{64}")
RUN_NAME = re.compile(r"([0-9]+)(?:-([0-9]+))?")
PARTIAL_NAME = re.compile(r"\.[0-9-]+\.[0-9a-f]{8}")
MIN_FILES = 32
"""The cache has space for this number of files that hold several chunks."""
EVICT_FRACTION = 20
"""An eviction frees 1/20 of the bound: it lists every file, so it should be rare."""

ChunkNeeds = dict[tuple[str, int], int]
"""Chunk (shard hash, number) → the last block of rows that needs it."""


class Usage:
    """Bytes in the folder, known while the folder is locked."""

    def __init__(self, size: int) -> None:
        self.bytes = size


class CacheFolder:
    """A cache's files; processes may share the folder."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        """The folder is created, or refused, on first use."""
        self.root, self.max_bytes, self.min_files = path, max_bytes, MIN_FILES
        self.checked, self.used = CheckedFiles(path / CHECKED), LastUses(path / USED)
        self._evictions = str(path / EVICTIONS)
        self.marked = False
        """True once the marker was seen: from then on a deleted folder is created again."""
        self.prefetch_needs: list[ChunkNeeds] = []
        """Per prefetcher in this process: the chunks that it waits for."""

    def path(self, shard: Shard, run: Run) -> Path:
        return self.root / shard.hash / _name(run)

    def runs(self, shard: Shard, first: int, end: int) -> list[Run]:
        """List the files that overlap the chunks [first, end), and mark them as used."""
        _ = self.lock_file  # creates the folder, or refuses it
        runs = [run for run in self._runs(shard) if run.first < end and first < run.end]
        for run in runs:
            self.used.mark(_usage_key(shard.hash, run))
        return runs

    def is_valid(self, shard: Shard, run: Run, data: Bytes, status: os.stat_result) -> bool:
        """Return True if a file's chunks match their digests. A file is hashed once by all
        processes together."""
        digests = chunk_digests(shard, *run)
        if self.checked.has(digests, status):
            return True
        for number in range(*run):
            chunk = data[Run(number, number + 1).byte_range(shard, run.first)]
            if not matches_digest(shard, number, chunk):
                return False
        self.checked.add(digests, status)
        return True

    def read(self, shard: Shard, run: Run) -> tuple[Bytes, bool] | None:
        """Return a file's content, and whether it is valid; None if the file is missing."""
        try:
            with self.path(shard, run).open("rb") as file:
                status = os.fstat(file.fileno())
                data: Bytes = np.frombuffer(file.read(), np.uint8)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise unreadable(error) from None
        byte_range = run.byte_range(shard)
        is_complete = len(data) == byte_range.stop - byte_range.start
        return data, is_complete and self.is_valid(shard, run, data, status)

    def evictions(self) -> tuple[int, int] | None:
        """Return a value that changes with each eviction by any process."""
        try:
            status = os.stat(self._evictions)  # noqa: PTH116 (asked for each group and shard)
        except OSError:  # none so far, or the folder was deleted
            return None
        return status.st_ino, status.st_size

    def keep(self, shard: Shard, run: Run, data: Bytes) -> None:
        """Write a run's verified chunks to the disk, except those already there and files larger
        than the bound."""
        temporary = None
        try:
            with self.locked() as usage:
                for missing_run in self._missing(shard, run):
                    path, chunks = (
                        self.path(shard, missing_run),
                        data[missing_run.byte_range(shard, run.first)],
                    )
                    if chunks.nbytes > self.max_bytes:
                        continue
                    self._make_room(usage, chunks.nbytes)
                    path.parent.mkdir(exist_ok=True)
                    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
                    temporary.write_bytes(chunks.data)
                    temporary.rename(path)
                    usage.bytes += chunks.nbytes
                    self.checked.add(chunk_digests(shard, *missing_run), path.stat())
                    self.used.mark(_usage_key(shard.hash, missing_run))
        except FileNotFoundError:
            return  # the folder is being deleted; missing chunks are fetched again
        except OSError as error:
            if temporary is not None:
                with suppress(OSError):
                    temporary.unlink()
            hint = "free some space, or put the cache on another disk"
            where = error.filename or str(self.root)  # a failed write does not name its file
            reason = file_fault(error)[0]
            raise StorageError(
                f"cannot write the cache: {reason}", where=where, hint=hint
            ) from None

    def remove(self, shard: Shard, numbers: Sequence[int]) -> None:
        """Remove the files that hold any of these chunks."""
        runs = [run for run in self._runs(shard) if not set(numbers).isdisjoint(range(*run))]
        if runs:
            with self.locked() as usage:
                usage.bytes -= sum(_remove(self.path(shard, run)) for run in runs)

    def _missing(self, shard: Shard, run: Run) -> Iterator[Run]:
        """Yield the missing parts of a run, cut to file size."""
        stored = {number for stored_run in self._runs(shard) for number in range(*stored_run)}
        max_chunks = chunks_per_file(self.max_bytes // self.min_files)
        for first, end in group_runs(number for number in range(*run) if number not in stored):
            for chunk in range(first, end, max_chunks):
                yield Run(chunk, min(chunk + max_chunks, end))

    @cached_property
    def lock_file(self) -> BinaryIO:
        """The file whose bytes stand for chunks: a process locks a chunk's byte to fetch it."""
        try:
            with self.locked() as usage:  # the bound may have been larger before
                self._make_room(usage, 0)
            return (self.root / LOCKS).open("a+b")
        except OSError as error:
            message = f"cannot use the cache: {error.strerror}"
            raise StorageError(message, where=str(self.root), hint="name another folder") from None

    @contextmanager
    def locked(self) -> Iterator[Usage]:
        """Lock the folder for writing; yield its size. Meanwhile the recorded size is UNKNOWN, so
        that after a kill the next process counts again."""
        with self._locked_marker() as file:
            raw = file.read(8)
            value = struct.unpack("<q", raw)[0] if len(raw) == 8 else UNKNOWN
            usage = Usage(self._recount() if value == UNKNOWN else value)
            _write(file.fileno(), UNKNOWN)
            yield usage
            _write(file.fileno(), usage.bytes)

    def _locked_marker(self) -> BinaryIO:
        """Open and lock the marker file; retry if the folder was deleted meanwhile, or two writers
        would hold two locks."""
        while True:
            file = self._marker()
            fcntl.flock(file, fcntl.LOCK_EX)
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(file.fileno()), (self.root / MARKER).stat()):
                    return file
            file.close()

    def _marker(self) -> BinaryIO:
        """Open the marker file; refuse a folder with files but no marker."""
        marker = self.root / MARKER
        while True:
            with suppress(FileNotFoundError):
                file = marker.open("r+b")
                self.marked = True
                return file
            self.root.mkdir(parents=True, exist_ok=True)
            is_foreign = not self.marked and any(self.root.iterdir())
            # Check for the marker last: another process may just have created it.
            if is_foreign and not marker.exists():
                raise ConfigError(
                    "the cache",
                    [ConfigProblem("", f"{self.root} is not empty and is not a headrace cache")],
                    hint="name an empty or a new folder",
                )
            marker.touch()

    def _make_room(self, usage: Usage, size: int) -> None:
        excess = usage.bytes + size - self.max_bytes
        if excess > 0:
            usage.bytes -= self._evict(max(excess, self.max_bytes // EVICT_FRACTION))

    def _evict(self, min_bytes: int) -> int:
        """Remove files until `needed` bytes are freed; return the bytes freed."""
        files = []
        for hash, run in self._files():
            chunks = [(hash, number) for number in range(*run)]
            blocks = [
                needs[chunk] for needs in self.prefetch_needs for chunk in chunks if chunk in needs
            ]
            order = (1, -min(blocks)) if blocks else (0, self.used.last_use(_usage_key(hash, run)))
            files.append((order, hash, run))
        freed_bytes = 0
        for _, hash, run in sorted(files):
            if freed_bytes >= min_bytes:
                break
            freed_bytes += _remove(self.root / hash / _name(run))
        with (self.root / EVICTIONS).open("ab") as file:
            file.write(b"\0")
        return freed_bytes

    def _files(self) -> Iterator[tuple[str, Run]]:
        """Yield each file's shard hash and run."""
        for folder in self.root.iterdir():
            if SHARD_NAME.fullmatch(folder.name):
                yield from ((folder.name, run) for run in _runs_in(folder))

    def _runs(self, shard: Shard) -> list[Run]:
        return _runs_in(self.root / shard.hash)

    def _recount(self) -> int:
        for path in self.root.glob("*/.*"):
            if SHARD_NAME.fullmatch(path.parent.name) and PARTIAL_NAME.fullmatch(path.name):
                path.unlink(missing_ok=True)
        return sum(_size(self.root / hash / _name(run)) for hash, run in self._files())


def _runs_in(folder: Path) -> list[Run]:
    """List the runs whose files lie in a folder."""
    try:
        matches = map(RUN_NAME.fullmatch, os.listdir(folder))  # noqa: PTH208 (names alone)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise unreadable(error) from None
    bounds = ((int(match[1]), match[2]) for match in matches if match)
    return [Run(first, int(end or first + 1)) for first, end in bounds]


def _name(run: Run) -> str:
    """Return a run's file name."""
    return f"{run.first}-{run.end}" if run.end > run.first + 1 else str(run.first)


def _usage_key(hash: str, run: Run) -> int:
    """Return a file's key in the table of last uses."""
    return int(hash[:8], 16) + run.first


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _remove(path: Path) -> int:
    """Remove a file; return the bytes freed."""
    size = _size(path)
    path.unlink(missing_ok=True)
    return size


def unreadable(error: OSError) -> StorageError:
    return StorageError(f"cannot read the cache: {error.strerror}", where=error.filename)


def _write(descriptor: int, value: int) -> None:
    os.pwrite(descriptor, struct.pack("<q", value), 0)
