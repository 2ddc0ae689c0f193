"""The folder of a cache: chunks as files, bounded in bytes, shared by processes.

    folder/.headrace-cache        says that the folder is ours, and how many bytes it holds
    folder/.headrace-turns        who fetches which chunks right now
    folder/<shard's hash>/<n>     chunk n of that shard

A chunk appears by one rename, so that a killed process leaves nothing half done and no reader needs
a lock. Writers take one (flock, which ends with its process) to keep the bound. What goes first
when room is needed: what nobody waits for, the longest unread first; then what is needed last.
Nothing but chunks is ever removed, and a folder that is deleted meanwhile is made again.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ...console.errors import ConfigError, Problem, StorageError
from ..arrays import Bytes
from .manifest import Shard

MARKER = ".headrace-cache"
TURNS = ".headrace-turns"
UNKNOWN = -1
CHUNK_NAME = re.compile(r"^[0-9a-f]{64}/[0-9]+$")
HALF_NAME = re.compile(r"^[0-9a-f]{64}/\.[0-9]+\.[0-9a-f]{8}$")
TOUCH_SECONDS = 30.0
EVICT_PART = 20
"""Each eviction frees this part of the bound: it looks at every chunk, so it should be seldom."""

Wanted = dict[tuple[str, int], int]
"""Chunks (a shard's hash and a number) and the block of rows that needs each last."""


class Usage:
    """Bytes in the folder, while its lock is held."""

    def __init__(self, size: int) -> None:
        self.bytes = size


class CacheFolder:
    def __init__(self, path: Path, max_bytes: int) -> None:
        """The folder is made, or refused, when it is first used."""
        self.root, self.max_bytes = path, max_bytes
        self.ours = False
        """Whether it was seen to be a cache; then it may be deleted, or half deleted, meanwhile."""
        self.wanted: list[Wanted] = []
        """What each prefetcher of this process waits for."""

    def path(self, shard: Shard, number: int) -> Path:
        return self.root / shard.hash / str(number)

    def has(self, shard: Shard, number: int) -> bool:
        """Whether a chunk is there; from now on it is one that was lately wanted."""
        _ = self.turns  # makes the folder, or refuses it
        path = self.path(shard, number)
        try:
            status = path.stat()
            if time.time() - status.st_mtime > TOUCH_SECONDS:
                os.utime(path)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise _unreadable(error) from None
        return True

    def piece(self, shard: Shard, number: int, start: int, end: int) -> Bytes | None:
        """A part of a chunk, if it is there."""
        # Once for each row: plain calls cost a fifth of a Path and a file object.
        try:
            descriptor = os.open(f"{self.root}/{shard.hash}/{number}", os.O_RDONLY)
            try:
                data = os.pread(descriptor, end - start, start)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _unreadable(error) from None
        return np.frombuffer(data, np.uint8) if len(data) == end - start else None

    def keep(self, shard: Shard, chunks: Mapping[int, Bytes]) -> None:
        """Put chunks of a shard on the disk, as far as the bound leaves room for them."""
        temporary = None
        try:
            with self.locked() as usage:
                for number, data in chunks.items():
                    path = self.path(shard, number)
                    if path.exists() or data.nbytes > self.max_bytes:
                        continue
                    self._make_room(usage, data.nbytes)
                    path.parent.mkdir(exist_ok=True)
                    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
                    temporary.write_bytes(data.data)
                    temporary.rename(path)
                    usage.bytes += data.nbytes
        except FileNotFoundError:
            return  # somebody deletes the folder at this moment; what is missing is fetched again
        except OSError as error:
            if temporary is not None:
                with suppress(OSError):
                    temporary.unlink()
            hint = "free some space, or put the cache on another disk"
            raise StorageError(f"cannot write the cache: {error}", hint=hint) from None

    def remove(self, shard: Shard, numbers: Sequence[int]) -> None:
        with self.locked() as usage:
            usage.bytes -= sum(_remove(self.path(shard, number)) for number in numbers)

    @cached_property
    def turns(self) -> BinaryIO:
        """The file on whose bytes those who fetch take turns."""
        try:
            with self.locked() as usage:  # the bound may have been larger once
                self._make_room(usage, 0)
            return (self.root / TURNS).open("a+b")
        except OSError as error:
            what = f"cannot use the cache: {error.strerror}"
            raise StorageError(what, where=str(self.root), hint="name another folder") from None

    @contextmanager
    def locked(self) -> Iterator[Usage]:
        """The bytes in the folder, ours to change. While they change they are marked unknown, so
        that whoever comes after a killed process counts them again."""
        with self._marker() as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            raw = file.read(8)
            value = struct.unpack("<q", raw)[0] if len(raw) == 8 else UNKNOWN
            usage = Usage(self._recount() if value == UNKNOWN else value)
            _write(file.fileno(), UNKNOWN)
            yield usage
            _write(file.fileno(), usage.bytes)

    def _marker(self) -> BinaryIO:
        """The file that says that the folder is ours; one of somebody else is refused."""
        marker = self.root / MARKER
        while True:
            with suppress(FileNotFoundError):
                file = marker.open("r+b")
                self.ours = True
                return file
            self.root.mkdir(parents=True, exist_ok=True)
            others = not self.ours and any(self.root.iterdir())
            if others and not marker.exists():  # asked in this order: others
                raise ConfigError(  # may be making it theirs, marker first
                    "the cache",
                    [Problem("", f"{self.root} is not empty and is not a headrace cache")],
                    hint="name a folder of its own",
                )
            marker.touch()

    def _make_room(self, usage: Usage, size: int) -> None:
        over = usage.bytes + size - self.max_bytes
        if over > 0:
            usage.bytes -= self._evict(max(over, self.max_bytes // EVICT_PART))

    def _evict(self, needed: int) -> int:
        """Remove chunks until `needed` bytes are free; returns how many were freed."""
        found = []
        for path in self._chunks():
            status = path.stat()
            name = (path.parent.name, int(path.name))
            steps = [wanted[name] for wanted in self.wanted if name in wanted]
            order = (1, -min(steps)) if steps else (0, status.st_mtime)
            found.append((order, path))
        freed = 0
        for _, path in sorted(found):
            if freed >= needed:
                break
            freed += _remove(path)
        return freed

    def _chunks(self) -> Iterator[Path]:
        for path in self.root.glob("*/*"):
            if CHUNK_NAME.match(path.relative_to(self.root).as_posix()):
                yield path

    def _recount(self) -> int:
        for path in self.root.glob("*/.*"):
            if HALF_NAME.match(path.relative_to(self.root).as_posix()):
                path.unlink(missing_ok=True)
        return sum(path.stat().st_size for path in self._chunks())


def _remove(path: Path) -> int:
    """Remove a chunk; returns how many bytes that freed."""
    try:
        size = path.stat().st_size
        path.unlink()
    except FileNotFoundError:
        return 0
    return size


def _unreadable(error: OSError) -> StorageError:
    return StorageError(f"cannot read the cache: {error.strerror}", where=error.filename)


def _write(descriptor: int, value: int) -> None:
    os.pwrite(descriptor, struct.pack("<q", value), 0)
