"""Prefetching in the known order: the chunks of the next steps are fetched before they are read.

The stream gives the chunks of every later block of rows, so nothing is guessed. One thread finds
the blocks ahead of the reader, and hands them to it in order. Other threads fetch their chunks,
those needed soonest first, each together with adjacent chunks that will be needed as well: the
fixed cost of a request exceeds that of its bytes. The walk is limited to a part of the cache, so
that prefetched chunks are not evicted before they are read.

The threads are daemons, and not those of a pool: at exit, Python waits until a pool has done all
that it was given.
"""

from __future__ import annotations

import atexit
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from itertools import groupby
from logging import DEBUG, WARNING

from ...console.errors import UserError
from ...console.log import get_logger
from ..datasets.cache import Cache
from ..datasets.cache_folder import Wanted
from ..datasets.chunks import CHUNK_BYTES, MOST_CHUNKS
from ..datasets.manifest import Shard
from .rows import FoundRows

log = get_logger(__name__)

Chunk = tuple[str, int]
"""A shard's hash and the number of a chunk."""

THREADS = 16
BURST = 256
"""Chunks that the walk collects before it starts fetches, so that adjacent ones are joined."""
CACHE_FRACTION = 2
"""Chunks fetched and not yet read take at most 1/2 of the cache."""
MOST_AHEAD = 4 << 30
"""Upper limit in bytes of chunks fetched and not yet read."""
MOST_ROWS = 1 << 17
"""Upper limit of rows found and not yet read: about 15 MB of places."""


class Queue:
    """Chunks to fetch, first in first out, except that adjacent chunks are taken together."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.order: deque[tuple[str, Shard, int]] = deque()
        self.waiting: defaultdict[str, set[int]] = defaultdict(set)

    def add(self, chunks: Iterable[tuple[str, Shard, int]]) -> None:
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
                while last in waiting and last - first < MOST_CHUNKS:
                    last += 1
                while first - 1 in waiting and last - first < MOST_CHUNKS:
                    first -= 1
                waiting.difference_update(range(first, last))
                return url, shard, first, last
        return None


class Prefetcher(Iterator[FoundRows]):
    """Finds blocks ahead of a reader, fetches their chunks, and gives the blocks in order."""

    def __init__(self, blocks: Iterator[FoundRows], cache: Cache) -> None:
        self.blocks, self.cache = blocks, cache
        self.limit = min(cache.folder.max_bytes // CACHE_FRACTION, MOST_AHEAD)
        self.found: deque[FoundRows] = deque()
        """The blocks that the reader has not yet taken."""
        self.ahead: deque[tuple[int, int, list[Chunk]]] = deque()
        """Number, rows and chunks of each block that the reader has not finished."""
        self.rows = 0
        """Rows of these blocks."""
        self.finished = 0
        self.wanted: Wanted = {}
        cache.folder.wanted.append(self.wanted)
        self.queue = Queue()
        self.changed = threading.Condition()
        self.full = self.stopped = self.ended = False
        self.error: BaseException = StopIteration()
        """Ends the blocks."""
        self.thread = threading.Thread(target=self._walk, name="headrace-prefetch", daemon=True)
        self.thread.start()
        for _ in range(THREADS):
            threading.Thread(target=self._fetch, name="headrace-fetch", daemon=True).start()
        atexit.register(self.close)  # a generator that is not finished is closed too late

    def __next__(self) -> FoundRows:
        with self.changed:
            self.changed.wait_for(lambda: self.found or self.ended)
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
            if self._may_go_on():
                self.changed.notify_all()

    def close(self) -> None:
        if self.stopped:
            return
        atexit.unregister(self.close)
        with self.changed, self.queue.changed:
            self.stopped = self.ended = True
            folder = self.cache.folder
            folder.wanted = [other for other in folder.wanted if other is not self.wanted]
            self.changed.notify_all()
            self.queue.changed.notify_all()

    def _walk(self) -> None:
        try:
            burst: list[tuple[str, Shard, int]] = []
            for number, found in enumerate(self.blocks):
                chunks = self._chunks(found)
                if not found.located.first:  # rows far ahead may lie in more than may stay open
                    found.pieces.files.clear()
                with self.changed:
                    if not self._may_go_on():
                        self._release(burst)
                    self.changed.wait_for(self._may_go_on)
                    if self.stopped:
                        return
                    fresh = [name for name in chunks if name not in self.wanted]
                    first = not self.ahead
                    self.wanted.update(dict.fromkeys(chunks, number))
                    rows = len(found.located.rows)
                    self.ahead.append((number, rows, list(chunks)))
                    self.rows += rows
                    self.found.append(found)
                    if len(self.found) == 1:  # the reader may wait for it
                        self.changed.notify_all()
                burst += [chunks[name] for name in fresh]
                if first or len(burst) > BURST:  # the reader is waiting for the first
                    self._release(burst)
            self._release(burst)
        except BaseException as error:  # the reader raises it
            self.error = error
        finally:
            with self.changed:
                self.ended = True
                self.changed.notify_all()

    def _may_go_on(self) -> bool:
        """True below the limits; once one is reached, not before half of it was read: the more
        chunks are fetched at once, the more of them are adjacent."""
        held = max(len(self.wanted) * CHUNK_BYTES / self.limit, self.rows / MOST_ROWS)
        if held >= 1:
            self.full = True
        elif held < 0.5:
            self.full = False
        return self.stopped or not self.ahead or not self.full

    def _release(self, burst: list[tuple[str, Shard, int]]) -> None:
        """Give the chunks of a burst to the fetching threads."""
        self.queue.add(burst)
        burst.clear()

    def _chunks(self, found: FoundRows) -> dict[Chunk, tuple[str, Shard, int]]:
        """Return the chunks of remote shards that a block reads, and (url, shard, number) of
        each."""
        located, pieces = found.located, found.pieces
        first, last = located.first, located.first + len(located.rows)
        chunks: dict[Chunk, tuple[str, Shard, int]] = {}
        for place, several in groupby(pieces.chunks(first, last), key=lambda chunk: chunk[0]):
            dataset, number = pieces.shards[place]
            shard = dataset.shard(number)
            if not dataset.is_mapped(shard):
                url = dataset.shards_url
                chunks.update(((shard.hash, each), (url, shard, each)) for _, each in several)
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
                    self.cache.fetch(*run)
            except Exception as error:
                # The reader raises user errors when it comes to the chunk.
                expected = self.stopped or isinstance(error, UserError)
                log.log(DEBUG if expected else WARNING, "prefetching chunks failed: %r", error)
