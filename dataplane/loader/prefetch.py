"""Prefetching in the known order: the chunks of the next steps are fetched before they are read.

The stream tells the chunks of every later block of rows, so nothing is guessed. A walking thread
finds blocks ahead of the reader and hands them over in order. Fetching threads fetch the chunks,
soonest needed first, and with a chunk its neighbours that will be needed as well: the fixed cost of
a request exceeds that of the bytes. The walk is limited to a part of the cache, so that prefetched
chunks are not evicted before they are read.

While the cache has all chunks, walking far ahead gains nothing, and several threads that need
Python's lock are slower than one. So the walk rests then: the reader itself finds blocks a little
ahead, and checks that the cache has their chunks.

Threads are daemons, not a pool's: at exit, Python waits until a pool has finished all its work.
"""

from __future__ import annotations

import atexit
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

from ...console.errors import UserError
from ...console.log import get_logger
from ..datasets.cache import Cache
from ..datasets.cache_folder import ChunkNeeds
from ..datasets.chunks import CHUNK_BYTES, MAX_RUN_CHUNKS
from ..datasets.manifest import Shard
from .rows import PendingRows

log = get_logger(__name__)

Chunk = tuple[str, int]
"""A shard's hash and a chunk number."""
StoredChunk = tuple[str, Shard, int]
"""A chunk in the store: dataset URL, shard, chunk number."""

NUM_FETCHERS = 16
CACHE_FRACTION = 2
"""Chunks fetched and not yet read take at most 1/2 of the cache."""


@dataclass(frozen=True, kw_only=True)
class PrefetchLimits:
    """How far a prefetcher runs ahead of the reader."""

    max_bytes: int = 4 << 30
    """Chunk bytes fetched and not yet read, also where half the cache is more."""
    max_rows: int = 1 << 17
    """Rows found and not yet read: about 15 MB of locations."""
    near_rows: int = 2048
    """Rows that the reader itself finds ahead while the cache has all chunks."""
    burst: int = 256
    """Chunks that the walk collects before it starts fetches, so that neighbours are joined."""


class FetchQueue:
    """Chunks to fetch, first in first out, except that neighbours are taken together."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.order: deque[StoredChunk] = deque()
        self.waiting: defaultdict[str, set[int]] = defaultdict(set)

    def add(self, chunks: Iterable[StoredChunk]) -> None:
        with self.changed:
            for url, shard, number in chunks:
                self.order.append((url, shard, number))
                self.waiting[shard.hash].add(number)
            self.changed.notify(min(len(self.order), NUM_FETCHERS))

    def take(self) -> tuple[str, Shard, int, int] | None:
        """Take the first waiting chunk and its waiting neighbours: (url, shard, first, end)."""
        with self.changed:
            while self.order:
                url, shard, number = self.order.popleft()
                waiting = self.waiting[shard.hash]
                if number not in waiting:
                    continue
                first, end = number, number + 1
                while end in waiting and end - first < MAX_RUN_CHUNKS:
                    end += 1
                while first - 1 in waiting and end - first < MAX_RUN_CHUNKS:
                    first -= 1
                waiting.difference_update(range(first, end))
                return url, shard, first, end
        return None


class Prefetcher(Iterator[PendingRows]):
    """Finds blocks ahead of a reader, fetches their chunks, and yields the blocks in order."""

    def __init__(
        self, blocks: Iterator[PendingRows], cache: Cache, limits: PrefetchLimits | None = None
    ) -> None:
        self.blocks, self.cache = blocks, cache
        self.limits = limits = limits or PrefetchLimits()
        self.max_bytes = min(cache.folder.max_bytes // CACHE_FRACTION, limits.max_bytes)
        self.ready: deque[PendingRows] = deque()
        """Blocks that the reader has not yet taken."""
        self.unfinished: deque[tuple[int, int, list[Chunk]]] = deque()
        """Blocks that the reader has not finished: number, rows and chunks."""
        self.unfinished_rows = 0
        self.num_found = self.num_finished = 0
        """Blocks found, and finished by the reader."""
        self.needs: ChunkNeeds = {}
        cache.folder.prefetch_needs.append(self.needs)
        self.burst: list[StoredChunk] = []
        self.queue = FetchQueue()
        self.num_cached = 0
        """Length of the current streak of chunks that the cache already had."""
        self.changed = threading.Condition()
        self.finding = threading.Lock()
        """Held by the thread that finds the next block."""
        self.full = self.stopped = self.ended = False
        self.end: BaseException = StopIteration()
        """Raised after the last block."""
        self.fault: BaseException | None = None
        """A thread's fault, which the reader raises at once: it may never meet the error itself."""
        self.thread = threading.Thread(target=self._walk, name="headrace-prefetch", daemon=True)
        self.thread.start()
        for _ in range(NUM_FETCHERS):
            threading.Thread(target=self._fetch, name="headrace-fetch", daemon=True).start()
        atexit.register(self.close)  # an unfinished generator is closed too late

    def __next__(self) -> PendingRows:
        if not self.ready and not self._find_next(wait=False):
            with self.changed:  # the walk is about to find it
                self.changed.wait_for(lambda: self.ready or self.ended)
        with self.changed:
            if self.fault is not None:
                raise self.fault
            if self.ready:
                return self.ready.popleft()
        raise self.end

    def finish_block(self) -> None:
        """Note that the reader has finished a block: its chunks may be evicted."""
        with self.changed:
            self.num_finished += 1
            while self.unfinished and self.unfinished[0][0] < self.num_finished:
                number, rows, chunks = self.unfinished.popleft()
                self.unfinished_rows -= rows
                for chunk in chunks:
                    if self.needs.get(chunk) == number:
                        del self.needs[chunk]
            if self._is_walking():
                self.changed.notify_all()
        near_rows = self.limits.near_rows
        if self.num_cached >= self.limits.burst and self.unfinished_rows < near_rows // 2:
            while self.unfinished_rows < near_rows and self._has_room():
                if not self._find_next(wait=False):
                    break
            self._check_burst()

    def close(self) -> None:
        if self.stopped:
            return
        atexit.unregister(self.close)
        with self.changed, self.queue.changed:
            self.stopped = self.ended = True
            folder = self.cache.folder
            folder.prefetch_needs = [n for n in folder.prefetch_needs if n is not self.needs]
            self.changed.notify_all()
            self.queue.changed.notify_all()

    def _walk(self) -> None:
        """Find blocks until the end, resting while there is no room or no need."""
        try:
            while not self.ended:
                self._find_next(wait=True)
                with self.changed:
                    walking = self._is_walking()
                if not walking:
                    self._release_burst()
                    with self.changed:
                        self.changed.wait_for(lambda: self.ended or self._is_walking())
        except BaseException as error:
            self._fail(error)

    def _find_next(self, *, wait: bool) -> bool:
        """Find the next block, and queue its chunks. Return False at the end. If another thread is
        finding the block, wait for that thread, or return False."""
        if not self.finding.acquire(blocking=wait):
            return False
        try:
            if self.ended:
                return False
            block = next(self.blocks)
            chunks = self._remote_chunks(block)
            if not block.located.first:  # rows far ahead may lie in more files than may stay open
                block.pieces.files.clear()
        except BaseException as error:  # the reader raises it
            with self.changed:
                self.end, self.ended = error, True
                self.changed.notify_all()
            self._release_burst()
            return False
        else:
            self._add(block, chunks)
            return True
        finally:
            self.finding.release()

    def _add(self, block: PendingRows, chunks: dict[Chunk, StoredChunk | None]) -> None:
        """Hand a block to the reader, and its chunks to the fetching threads."""
        rows = len(block.located.rows)
        with self.changed:
            is_next = not self.unfinished
            self.burst += [
                stored for chunk, stored in chunks.items() if stored and chunk not in self.needs
            ]
            self.needs.update(dict.fromkeys(chunks, self.num_found))
            self.unfinished.append((self.num_found, rows, list(chunks)))
            self.num_found += 1
            self.unfinished_rows += rows
            self.ready.append(block)
            self.changed.notify_all()
        due = is_next or len(self.burst) > self.limits.burst  # the reader waits for the next block
        if due and self.num_cached < self.limits.burst:
            self._release_burst()

    def _is_walking(self) -> bool:
        """True if blocks are found far ahead: there is room, and the cache lacks chunks."""
        return self._has_room() and self.num_cached < self.limits.burst

    def _has_room(self) -> bool:
        """True below the limits. Once a limit is reached, False until half was read: the more
        chunks are fetched at once, the more are neighbours."""
        used_bytes = len(self.needs) * CHUNK_BYTES
        used = max(used_bytes / self.max_bytes, self.unfinished_rows / self.limits.max_rows)
        if used >= 1:
            self.full = True
        elif used < 0.5:
            self.full = False
        return not self.unfinished or not self.full

    def _take_burst(self) -> list[StoredChunk]:
        with self.changed:
            burst, self.burst = self.burst, []
        return burst

    def _release_burst(self) -> None:
        """Queue a burst's chunks."""
        if burst := self._take_burst():
            self.queue.add(burst)

    def _check_burst(self) -> None:
        """Queue those of a burst's chunks that the cache lacks, and resume the walk if there are
        some."""
        by_shard: defaultdict[str, list[StoredChunk]] = defaultdict(list)
        for stored in self._take_burst():
            by_shard[stored[1].hash].append(stored)
        missing = []
        for chunks in by_shard.values():
            shard, numbers = chunks[0][1], [number for *_, number in chunks]
            cached = self.cache.cached_chunks(shard, min(numbers), max(numbers) + 1)
            missing += [stored for stored in chunks if stored[2] not in cached]
        if missing:
            self.queue.add(missing)
            with self.changed:
                self.num_cached = 0
                self.changed.notify_all()

    def _remote_chunks(self, block: PendingRows) -> dict[Chunk, StoredChunk | None]:
        """Return the chunks that a block reads from remote shards: where they are stored, or None
        if they are mapped."""
        located, pieces = block.located, block.pieces
        first, end = located.first, located.first + len(located.rows)
        chunks: dict[Chunk, StoredChunk | None] = {}
        for place, shard_chunks in groupby(pieces.chunks(first, end), key=lambda chunk: chunk[0]):
            dataset, shard_number = pieces.shards[place]
            open_shard = dataset.get_open_shard(shard_number)
            shard = open_shard.shard if open_shard else dataset.shards[shard_number]
            if dataset.is_mapped(shard):
                continue
            unmapped = open_shard.file.current()[1] if open_shard else None
            for _, number in shard_chunks:
                mapped = unmapped is not None and not unmapped[number]
                chunks[shard.hash, number] = None if mapped else (dataset.shards_url, shard, number)
        return chunks

    def _fetch(self) -> None:
        """Fetch queued chunks until the prefetcher is closed."""
        try:
            while True:
                with self.queue.changed:
                    self.queue.changed.wait_for(lambda: self.stopped or self.queue.order)
                if self.stopped:
                    return
                if run := self.queue.take():
                    self._fetch_run(run)
        except BaseException as error:
            self._fail(error)

    def _fetch_run(self, run: tuple[str, Shard, int, int]) -> None:
        """Fetch a run, and count the chunks that the cache already had."""
        try:
            num_fetched = self.cache.fetch(*run)
        except UserError as error:
            # The reader raises it when it comes to the chunk.
            log.debug("prefetching chunks failed: %r", error)
            return
        *_, first, end = run
        with self.changed:
            before = self.num_cached
            self.num_cached = 0 if num_fetched else before + end - first
            if before >= self.limits.burst > self.num_cached:
                self.changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        """End the walk; the reader raises the error at its next block."""
        with self.changed:
            self.fault, self.ended = self.fault or error, True
            self.changed.notify_all()
