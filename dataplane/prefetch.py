"""Prefetching by the known order: the chunks of the coming steps are fetched before they are read.

The stream says what every later step will need, so nothing is guessed. One thread walks ahead of
the reader, step by step; a few fetch. It never runs ahead by more than a part of the cache, so that
what it brings is not evicted before it is read.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from ..console.log import get_logger
from .cache import Cache, Wanted
from .dataset import Dataset
from .manifest import CHUNK_BYTES
from .permutation import Int64
from .rows import RowReader
from .stream import Stream

log = get_logger(__name__)

Name = tuple[str, int]
"""A shard's hash, and a chunk of it."""

THREADS = 16
CACHE_PART = 2
"""Hold no more than this part of the cache with what is wanted and not yet read."""
MOST_AHEAD = 1 << 30


class Prefetcher:
    """Fetches ahead of a reader that goes through `steps` in order."""

    def __init__(
        self, stream: Stream, cache: Cache, steps: Iterable[int], rows: Callable[[int], Int64]
    ) -> None:
        """`rows` gives the rows of a step that the reader will ask for."""
        # A row reader of its own, because open datasets are not shared between threads.
        self.reader = RowReader(stream.plan, cache=cache, stream=stream)
        self.cache = cache
        self.steps, self.rows = steps, rows
        self.limit = min(cache.max_bytes // CACHE_PART, MOST_AHEAD)
        self.ahead: deque[tuple[int, list[Name]]] = deque()
        """The steps that the walk is ahead by, and what each of them reads."""
        self.wanted: Wanted = {}
        cache.wanted.append(self.wanted)
        self.changed = threading.Condition()
        self.stopped = False
        self.pool = ThreadPoolExecutor(THREADS, thread_name_prefix="headrace-fetch")
        self.thread = threading.Thread(target=self._walk, name="headrace-prefetch", daemon=True)
        self.thread.start()

    def done(self, step: int) -> None:
        """The reader has finished a step: what it used may go."""
        with self.changed:
            while self.ahead and self.ahead[0][0] <= step:
                finished, names = self.ahead.popleft()
                for name in names:
                    if self.wanted.get(name) == finished:
                        del self.wanted[name]
            self.changed.notify()

    def close(self) -> None:
        with self.changed:
            self.stopped = True
            self.cache.wanted = [other for other in self.cache.wanted if other is not self.wanted]
            self.changed.notify()
        self.pool.shutdown(wait=False, cancel_futures=True)

    def _walk(self) -> None:
        try:
            for step in self.steps:
                wanted = self._chunks(step)
                with self.changed:
                    self.changed.wait_for(self._may_go_on)
                    if self.stopped:
                        return
                    fresh = [name for name in wanted if name not in self.wanted]
                    self.wanted.update(dict.fromkeys(wanted, step))
                    self.ahead.append((step, list(wanted)))
                for name in fresh:
                    self.pool.submit(self._fetch, *wanted[name])
        except Exception as error:  # the reader meets the same trouble in its own turn
            log.debug("prefetching stopped: %s", error)

    def _may_go_on(self) -> bool:
        return self.stopped or not self.ahead or len(self.wanted) * CHUNK_BYTES < self.limit

    def _chunks(self, step: int) -> dict[Name, tuple[Dataset, int, int]]:
        """What a step reads, each chunk once, and where it comes from."""
        rows = self.rows(step)
        if not len(rows):
            return {}
        located = self.reader.locate(rows)
        found = {}
        for source, token in zip(located.sources.tolist(), located.tokens.tolist(), strict=True):
            dataset = self.reader.dataset(source)
            for number, chunk in dataset.chunks(token, token + located.length + 1):
                shard = dataset.shards[number]
                found[shard.hash, chunk] = (dataset, number, chunk)
        return found

    def _fetch(self, dataset: Dataset, number: int, chunk: int) -> None:
        try:
            self.cache.fetch(dataset.url, dataset.shards[number], chunk)
        except Exception as error:  # as above
            log.debug("prefetching a chunk failed: %s", error)
