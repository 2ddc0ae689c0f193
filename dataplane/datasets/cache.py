"""The cache: chunks of remote shards, verified, on a local disk.

A chunk is hashed before it is kept, and once more when a process first reads it from the disk: a
power cut can lose what was not yet written out, and disks rot. Chunks that lie side by side are
fetched by one request; whoever else wants one of them, thread or process, waits for it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from ...console.errors import IntegrityError
from ...console.log import get_logger
from ..arrays import Bytes
from ..storage import storage
from .cache_folder import CacheFolder
from .chunks import CHUNK_BYTES, RESTORE, check_chunk, spans
from .manifest import Shard

log = get_logger(__name__)

DEFAULT_BYTES = 64 << 30


class Cache:
    def __init__(self, folder: str | Path | None = None, *, max_bytes: int = DEFAULT_BYTES) -> None:
        """The folder is made, or refused, when the first chunk is asked for."""
        self.folder = CacheFolder(default_folder() if folder is None else Path(folder), max_bytes)
        self.fetched_bytes = 0
        self.requests = 0
        self._in_flight: set[tuple[str, int]] = set()
        """The chunks that threads of this process have a turn at."""
        self._landed = threading.Condition()

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (self.folder.root, self.folder.max_bytes))

    def chunks(self, url: str, shard: Shard, first: int, last: int) -> list[Bytes]:
        """Chunks side by side, checked: from the disk, or from their home."""
        found: dict[int, Bytes] = {}

        def missing() -> list[int]:
            numbers = [number for number in range(first, last) if number not in found]
            loaded = ((number, self._load(shard, number)) for number in numbers)
            found.update((number, chunk) for number, chunk in loaded if chunk is not None)
            return [number for number in numbers if number not in found]

        if missing():
            with self._turn(shard, first, last):
                still = missing()  # somebody else may have brought them meanwhile
                self.folder.remove(shard, still)  # what is there is not what it was
                if still and shard.stored_name:
                    found = self._unpack(url, shard)
                else:
                    for start, end in spans(still):
                        found |= self._fetch(url, shard, start, end)
        return [found[number] for number in range(first, last)]

    def fetch(self, url: str, shard: Shard, first: int, last: int) -> None:
        """Have chunks on the disk."""
        missing = (number for number in range(first, last) if not self.folder.has(shard, number))
        for start, end in spans(missing):
            self.chunks(url, shard, start, end)

    def piece(self, shard: Shard, number: int, start: int, end: int) -> Bytes | None:
        """A part of a chunk, if it is on the disk; whoever asks has had the chunk checked."""
        return self.folder.piece(shard, number, start, end)

    def _load(self, shard: Shard, number: int) -> Bytes | None:
        """A chunk from the disk, if it is there and still what it was."""
        if not self.folder.has(shard, number):
            return None
        size = min(CHUNK_BYTES, shard.size - number * CHUNK_BYTES)
        kept = self.folder.piece(shard, number, 0, size)
        try:
            if kept is not None:
                check_chunk(str(self.folder.path(shard, number)), shard, number, kept)
                return kept
        except IntegrityError as error:
            log.warning("%s; it is fetched again", error.what)
        return None

    def _fetch(self, url: str, shard: Shard, first: int, last: int) -> dict[int, Bytes]:
        where = storage.join(url, shard.name)
        start, end = first * CHUNK_BYTES, last * CHUNK_BYTES
        if end >= shard.size:
            end = shard.size + 1  # a byte that should not be there
        data = storage.read(where, start, end)
        self._count(len(data))
        if start + len(data) > shard.size:
            raise IntegrityError(
                f"{where} has more than the {shard.size:,} bytes that it should have", hint=RESTORE
            )
        return self._checked(where, shard, first, last, data)

    def _unpack(self, url: str, shard: Shard) -> dict[int, Bytes]:
        """The chunks of a compressed shard: it is fetched and checked whole."""
        import zstandard

        assert shard.stored_name is not None
        where = storage.join(url, shard.stored_name)
        packed = storage.read(where)
        self._count(len(packed))
        if hashlib.sha256(packed).hexdigest() != shard.stored_hash:
            raise IntegrityError(f"{where} is damaged", hint=RESTORE)
        data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=shard.size)
        return self._checked(where, shard, 0, -(-shard.size // CHUNK_BYTES), data)

    def _checked(
        self, where: str, shard: Shard, first: int, last: int, data: bytes
    ) -> dict[int, Bytes]:
        """The bytes of chunks side by side, cut, checked and kept."""
        whole, chunks = np.frombuffer(data, np.uint8), {}
        try:
            for place, number in enumerate(range(first, last)):
                chunk = whole[place * CHUNK_BYTES : (place + 1) * CHUNK_BYTES]
                check_chunk(where, shard, number, chunk)
                chunks[number] = chunk
        finally:
            self.folder.keep(shard, chunks)  # those before a damaged one are good
        return chunks

    def _count(self, size: int) -> None:
        with self._landed:
            self.fetched_bytes += size
            self.requests += 1

    @contextmanager
    def _turn(self, shard: Shard, first: int, last: int) -> Iterator[None]:
        """One fetch of a chunk at a time: among threads by a set, among processes by a lock on
        bytes of a file. That lock belongs to the open file (OFD): it ends with its process, and
        two processes whose threads wait for each other's bytes are no deadlock."""
        if shard.stored_name:
            first, last = 0, 1  # stands for all
        names = {(shard.hash, number) for number in range(first, last)}
        turns = self.folder.turns

        def lock(kind: int) -> None:
            byte = int(shard.hash[:8], 16) + first
            request = struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, last - first, 0)
            fcntl.fcntl(turns, fcntl.F_OFD_SETLKW, request)

        with self._landed:
            self._landed.wait_for(lambda: self._in_flight.isdisjoint(names))
            self._in_flight |= names
        try:
            lock(fcntl.F_WRLCK)
            yield
        finally:
            lock(fcntl.F_UNLCK)
            with self._landed:
                self._in_flight -= names
                self._landed.notify_all()


def default_folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "headrace"


def _reopen(folder: Path, max_bytes: int) -> Cache:
    return Cache(folder, max_bytes=max_bytes)
