"""Prefetching in the known order: the chunks of the next steps are fetched before they are read.

The stream gives the chunks of every later block of rows, so nothing is guessed. One thread walks
ahead of the reader, block by block, and opens datasets and shards. Other threads fetch the chunks,
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
from collections.abc import Callable, Collection, Iterable
from logging import DEBUG, WARNING
from typing import TypeVar

import numpy as np

from ...console.errors import UserError
from ...console.log import get_logger
from ..arrays import Int64
from ..datasets.cache import Cache
from ..datasets.cache_folder import Wanted
from ..datasets.chunks import CHUNK_BYTES, MOST_CHUNKS
from ..datasets.dataset import Parts
from ..datasets.manifest import Shard
from ..order.stream import Located
from .gather import Pieces
from .rows import RowReader

log = get_logger(__name__)

T = TypeVar("T")
Chunk = tuple[str, int]
"""A shard's hash and the number of a chunk."""

THREADS = 16
BURST = 256
"""Chunks that the walk collects before it starts fetches, so that adjacent ones are joined."""
CACHE_FRACTION = 2
"""Chunks fetched and not yet read take at most 1/2 of the cache."""
MOST_AHEAD = 4 << 30
"""Upper limit in bytes of chunks fetched and not yet read."""


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
            self.changed.notify_all()

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


class Prefetcher:
    """Fetches ahead of a reader that reads `blocks` in order."""

    def __init__(self, reader: RowReader, cache: Cache, blocks: Iterable[Located]) -> None:
        self.reader, self.cache, self.blocks = reader, cache, blocks
        self.limit = min(cache.folder.max_bytes // CACHE_FRACTION, MOST_AHEAD)
        self.ahead: deque[tuple[int, list[Chunk]]] = deque()
        """Numbers and chunks of the blocks between the reader and the walk."""
        self.finished = 0
        self.wanted: Wanted = {}
        cache.folder.wanted.append(self.wanted)
        self.queue = Queue()
        self.opened: set[tuple[int, int]] = set()
        """Opened shards: (source, shard number)."""
        self.found: tuple[Located, list[tuple[str, Shard, Int64, Int64]]] | None = None
        """The last rows that were located together, and the chunks that they read."""
        self.changed = threading.Condition()
        self.full = self.stopped = False
        self.thread = threading.Thread(target=self._walk, name="headrace-prefetch", daemon=True)
        self.thread.start()
        for _ in range(THREADS):
            threading.Thread(target=self._fetch, name="headrace-fetch", daemon=True).start()
        atexit.register(self.close)  # a generator that is not finished is closed too late

    def done(self) -> None:
        """Call when the reader has finished a block: its chunks may be evicted."""
        with self.changed:
            self.finished += 1
            while self.ahead and self.ahead[0][0] < self.finished:
                finished, names = self.ahead.popleft()
                for name in names:
                    if self.wanted.get(name) == finished:
                        del self.wanted[name]
            self.changed.notify()

    def close(self) -> None:
        if self.stopped:
            return
        atexit.unregister(self.close)
        with self.changed, self.queue.changed:
            self.stopped = True
            folder = self.cache.folder
            folder.wanted = [other for other in folder.wanted if other is not self.wanted]
            self.changed.notify()
            self.queue.changed.notify_all()

    def _walk(self) -> None:
        try:
            burst: list[tuple[str, Shard, int]] = []
            for number, located in enumerate(self.blocks):
                wanted = self._chunks(located)
                with self.changed:
                    if not self._may_go_on():
                        self._release(burst)
                    self.changed.wait_for(self._may_go_on)
                    if self.stopped:
                        return
                    fresh = [name for name in wanted if name not in self.wanted]
                    first = not self.ahead
                    self.wanted.update(dict.fromkeys(wanted, number))
                    self.ahead.append((number, list(wanted)))
                burst += [wanted[name] for name in fresh]
                if first or len(burst) > BURST:  # the reader is waiting for the first
                    self._release(burst)
            self._release(burst)
        except Exception as error:
            self._log("prefetching stopped", error)

    def _may_go_on(self) -> bool:
        """True below the limit; once reached, not before half of it was read: the more chunks are
        fetched at once, the more of them are adjacent."""
        held = len(self.wanted) * CHUNK_BYTES
        if held >= self.limit:
            self.full = True
        elif held < self.limit // 2:
            self.full = False
        return self.stopped or not self.ahead or not self.full

    def _release(self, burst: list[tuple[str, Shard, int]]) -> None:
        """Give the chunks of a burst to the fetching threads."""
        self.queue.add(burst)
        burst.clear()

    def _chunks(self, located: Located) -> dict[Chunk, tuple[str, Shard, int]]:
        """Return the remote chunks that a block reads, and (url, shard, number) of each."""
        whole = located.whole or located
        if self.found is None or self.found[0] is not whole:
            self.found = whole, self._find(whole)
        chunks = {}
        for url, shard, rows, numbers in self.found[1]:
            ends = (located.first, located.first + len(located.rows))
            for number in sorted(set(numbers[slice(*rows.searchsorted(ends))].tolist())):
                chunks[shard.hash, number] = (url, shard, number)
        return chunks

    def _find(self, located: Located) -> list[tuple[str, Shard, Int64, Int64]]:
        """Return for each remote shard its URL, itself, and the chunks that rows read, each with
        its row, row by row."""
        parts = self._parts(located)
        self._open({(source, part.shard) for source, _, part in parts})
        found = []
        for source, rows, part in parts:
            dataset = self.reader.dataset(source)
            shard = dataset.open_shard(part.shard)
            if dataset.is_mapped(shard.shard):
                continue
            pieces = Pieces.of(shard, part)
            chunks, owners = pieces.chunks(shard)
            rows = rows[part.spans][pieces.parts][owners]
            order = rows.argsort(kind="stable")
            found.append((dataset.shards_url, shard.shard, rows[order], chunks[order]))
        return found

    def _parts(self, located: Located) -> list[tuple[int, Int64, Parts]]:
        """Return the parts of the rows in each shard, after their source and the row of each span;
        open the datasets in parallel: on an object store each takes several requests in
        sequence."""
        reads = located.reads()
        sources = located.sources[reads.rows]
        distinct = np.unique(sources).tolist()
        if fresh := [source for source in distinct if source not in self.reader.opened]:
            _together(self.reader.dataset, fresh)
        parts = []
        for source in distinct:
            chosen = np.flatnonzero(sources == source)
            dataset, rows = self.reader.dataset(source), reads.rows[chosen]
            split = dataset.split(reads.starts[chosen], reads.ends[chosen])
            parts += [(source, rows, part) for part in split]
        return parts

    def _open(self, shards: set[tuple[int, int]]) -> None:
        """Open the shards that rows lie in, in parallel."""
        fresh = shards - self.opened
        if fresh:
            _together(lambda at: self.reader.dataset(at[0]).open_shard(at[1]), fresh)
            self.opened |= fresh

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
                self._log("prefetching chunks failed", error)

    def _log(self, what: str, error: Exception) -> None:
        """Log an error: at DEBUG if the reader will raise it (a user error), else as a warning."""
        expected = self.stopped or isinstance(error, UserError)
        log.log(DEBUG if expected else WARNING, "%s: %r", what, error)


def _together(act: Callable[[T], object], items: Collection[T]) -> None:
    """Run `act` on all items at a time; raise the first error."""
    waiting, errors = deque(items), deque[Exception]()

    def work() -> None:
        while True:
            try:
                item = waiting.popleft()
            except IndexError:
                return
            try:
                act(item)
            except Exception as error:
                errors.append(error)

    threads = [
        threading.Thread(target=work, name="headrace-open", daemon=True)
        for _ in range(min(THREADS, len(items)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
