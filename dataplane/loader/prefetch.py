"""Prefetching in the known order: the chunks of the next steps are fetched before they are read.

The stream gives the chunks of every later block of rows, so nothing is guessed. One thread finds
the blocks ahead of the reader, and hands them to it in order. Other threads fetch their chunks,
those needed soonest first, each together with adjacent chunks that will be needed as well: the
fixed cost of a request exceeds that of its bytes. The walk is limited to a part of the cache, so
that prefetched chunks are not evicted before they are read.

While the cache has all chunks, nothing is gained far ahead, and threads that need Python's lock at
a time take longer than one. So the walk rests then. The reader finds the next blocks itself, a
little ahead, and looks whether the cache has their chunks.

The threads are daemons, and not those of a pool: at exit, Python waits until a pool has done all
that it was given.
"""

from __future__ import annotations

import atexit
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from logging import DEBUG, WARNING

from ...console.errors import UserError
from ...console.log import get_logger
from ..datasets.cache import Cache
from ..datasets.cache_folder import ChunkNeeds
from ..datasets.chunks import CHUNK_BYTES, MAX_RUN_CHUNKS
from ..datasets.manifest import Shard
from .rows import FoundRows

log = get_logger(__name__)

Chunk = tuple[str, int]
"""A shard's hash and the number of a chunk."""
Stored = tuple[str, Shard, int]
"""The same chunk in its store: the URL of a dataset, a shard, and the number."""

THREADS = 16
CACHE_FRACTION = 2
"""Chunks fetched and not yet read take at most 1/2 of the cache."""


@dataclass(frozen=True, kw_only=True)
class PrefetchLimits:
    """How far a prefetcher is ahead of its reader."""

    max_bytes: int = 4 << 30
    """Bytes of chunks fetched and not yet read, also where half of the cache is more."""
    max_rows: int = 1 << 17
    """Rows found and not yet read: about 15 MB of places."""
    near_rows: int = 2048
    """Rows that the reader itself finds ahead while the cache has all chunks."""
    burst: int = 256
    """Chunks that the walk collects before it starts fetches, so that adjacent ones are joined."""


class Queue:
    """Chunks to fetch, first in first out, except that adjacent chunks are taken together."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.order: deque[Stored] = deque()
        self.waiting: defaultdict[str, set[int]] = defaultdict(set)

    def add(self, chunks: Iterable[Stored]) -> None:
        with self.changed:
            for url, shard, number in chunks:
                self.order.append((url, shard, number))
                self.waiting[shard.hash].add(number)
            self.changed.notify(min(len(self.order), THREADS))

    def take(self) -> tuple[str, Shard, int, int] | None:
        """Take the first waiting chunk and its waiting neighbours: (url, shard, first, last)."""
        with self.changed:
            while self.order:
                url, shard, number = self.order.popleft()
                waiting = self.waiting[shard.hash]
                if number not in waiting:
                    continue
                first, last = number, number + 1
                while last in waiting and last - first < MAX_RUN_CHUNKS:
                    last += 1
                while first - 1 in waiting and last - first < MAX_RUN_CHUNKS:
                    first -= 1
                waiting.difference_update(range(first, last))
                return url, shard, first, last
        return None


class Prefetcher(Iterator[FoundRows]):
    """Finds blocks ahead of a reader, fetches their chunks, and gives the blocks in order."""

    def __init__(
        self, blocks: Iterator[FoundRows], cache: Cache, limits: PrefetchLimits | None = None
    ) -> None:
        self.blocks, self.cache = blocks, cache
        self.limits = limits = limits or PrefetchLimits()
        self.max_bytes = min(cache.folder.max_bytes // CACHE_FRACTION, limits.max_bytes)
        self.found: deque[FoundRows] = deque()
        """The blocks that the reader has not yet taken."""
        self.ahead: deque[tuple[int, int, list[Chunk]]] = deque()
        """Number, rows and chunks of each block that the reader has not finished."""
        self.rows = 0
        """Rows of these blocks."""
        self.number = self.finished = 0
        """Blocks found, and finished by the reader."""
        self.wanted: ChunkNeeds = {}
        cache.folder.prefetch_needs.append(self.wanted)
        self.burst: list[Stored] = []
        self.queue = Queue()
        self.held = 0
        """Chunks in a row, the latest ones, that the cache had."""
        self.changed = threading.Condition()
        self.turn = threading.Lock()
        """Held by the thread that finds the next block."""
        self.full = self.stopped = self.ended = False
        self.error: BaseException = StopIteration()
        """Ends the blocks."""
        self.thread = threading.Thread(target=self._walk, name="headrace-prefetch", daemon=True)
        self.thread.start()
        for _ in range(THREADS):
            threading.Thread(target=self._fetch, name="headrace-fetch", daemon=True).start()
        atexit.register(self.close)  # a generator that is not finished is closed too late

    def __next__(self) -> FoundRows:
        if not self.found and not self._find(wait=False):
            with self.changed:  # the walk is about to find it
                self.changed.wait_for(lambda: self.found or self.ended)
        with self.changed:
            if self.found:
                return self.found.popleft()
        raise self.error

    def done(self) -> None:
        """Call when the reader has finished a block: its chunks may be evicted."""
        with self.changed:
            self.finished += 1
            while self.ahead and self.ahead[0][0] < self.finished:
                finished, rows, names = self.ahead.popleft()
                self.rows -= rows
                for name in names:
                    if self.wanted.get(name) == finished:
                        del self.wanted[name]
            if self._is_walking():
                self.changed.notify_all()
        if self.held >= self.limits.burst and self.rows < self.limits.near_rows // 2:
            while self.rows < self.limits.near_rows and self._has_room() and self._find(wait=False):
                pass
            self._look()

    def close(self) -> None:
        if self.stopped:
            return
        atexit.unregister(self.close)
        with self.changed, self.queue.changed:
            self.stopped = self.ended = True
            folder = self.cache.folder
            folder.prefetch_needs = [n for n in folder.prefetch_needs if n is not self.wanted]
            self.changed.notify_all()
            self.queue.changed.notify_all()

    def _walk(self) -> None:
        while not self.ended:
            self._find(wait=True)
            with self.changed:
                walking = self._is_walking()
            if not walking:
                self._release()
                with self.changed:
                    self.changed.wait_for(lambda: self.ended or self._is_walking())

    def _find(self, *, wait: bool) -> bool:
        """Find the next block, and give its chunks to the fetching threads. Return False at the
        end. If another thread is finding it, wait for that thread, or return False."""
        if not self.turn.acquire(blocking=wait):
            return False
        try:
            if self.ended:
                return False
            found = next(self.blocks)
            chunks = self._chunks(found)
            if not found.located.first:  # rows far ahead may lie in more than may stay open
                found.pieces.files.clear()
        except BaseException as error:  # the reader raises it
            with self.changed:
                self.error, self.ended = error, True
                self.changed.notify_all()
            self._release()
            return False
        else:
            self._add(found, chunks)
            return True
        finally:
            self.turn.release()

    def _add(self, found: FoundRows, chunks: dict[Chunk, Stored | None]) -> None:
        """Hand a block to the reader, and its chunks to the fetching threads."""
        rows = len(found.located.rows)
        with self.changed:
            first = not self.ahead
            self.burst += [at for name, at in chunks.items() if at and name not in self.wanted]
            self.wanted.update(dict.fromkeys(chunks, self.number))
            self.ahead.append((self.number, rows, list(chunks)))
            self.number += 1
            self.rows += rows
            self.found.append(found)
            self.changed.notify_all()
        due = first or len(self.burst) > self.limits.burst  # the reader waits for the first
        if due and self.held < self.limits.burst:
            self._release()

    def _is_walking(self) -> bool:
        """True if blocks are found far ahead: there is room, and the cache lacks chunks."""
        return self._has_room() and self.held < self.limits.burst

    def _has_room(self) -> bool:
        """True below the limits; once one is reached, not before half of it was read: the more
        chunks are fetched at once, the more of them are adjacent."""
        taken_bytes = len(self.wanted) * CHUNK_BYTES
        taken = max(taken_bytes / self.max_bytes, self.rows / self.limits.max_rows)
        if taken >= 1:
            self.full = True
        elif taken < 0.5:
            self.full = False
        return not self.ahead or not self.full

    def _release(self) -> None:
        """Give the chunks of a burst to the fetching threads."""
        with self.changed:
            burst, self.burst = self.burst, []
        if burst:
            self.queue.add(burst)

    def _look(self) -> None:
        """Look whether the cache has the chunks of a burst. Fetch the others, and let the walk go
        on if there are some."""
        with self.changed:
            burst, self.burst = self.burst, []
        shards: defaultdict[str, list[Stored]] = defaultdict(list)
        for chunk in burst:
            shards[chunk[1].hash].append(chunk)
        lacking = []
        for own in shards.values():
            shard, numbers = own[0][1], [number for *_, number in own]
            held = self.cache.cached_chunks(shard, min(numbers), max(numbers) + 1)
            lacking += [chunk for chunk in own if chunk[2] not in held]
        if lacking:
            self.queue.add(lacking)
            with self.changed:
                self.held = 0
                self.changed.notify_all()

    def _chunks(self, found: FoundRows) -> dict[Chunk, Stored | None]:
        """Return the chunks of remote shards that a block reads, and where those are stored that
        are not mapped."""
        located, pieces = found.located, found.pieces
        first, last = located.first, located.first + len(located.rows)
        chunks: dict[Chunk, Stored | None] = {}
        for place, several in groupby(pieces.chunks(first, last), key=lambda chunk: chunk[0]):
            dataset, number = pieces.shards[place]
            opened = dataset.get_open_shard(number)
            shard = opened.shard if opened else dataset.shards[number]
            if dataset.is_mapped(shard):
                continue
            url, unmapped = dataset.shards_url, opened.file.current()[1] if opened else None
            for _, each in several:
                mapped = unmapped is not None and not unmapped[each]
                chunks[shard.hash, each] = None if mapped else (url, shard, each)
        return chunks

    def _fetch(self) -> None:
        """Fetch chunks until the prefetcher is closed."""
        while True:
            with self.queue.changed:
                self.queue.changed.wait_for(lambda: self.stopped or self.queue.order)
            if self.stopped:
                return
            try:
                if run := self.queue.take():
                    self._count(run, self.cache.fetch(*run))
            except Exception as error:
                # The reader raises user errors when it comes to the chunk.
                expected = self.stopped or isinstance(error, UserError)
                log.log(DEBUG if expected else WARNING, "prefetching chunks failed: %r", error)

    def _count(self, run: tuple[str, Shard, int, int], fetched: int) -> None:
        """Note how many chunks of a run the cache lacked."""
        *_, first, last = run
        with self.changed:
            was = self.held
            self.held = 0 if fetched else was + last - first
            if was >= self.limits.burst > self.held:
                self.changed.notify_all()
