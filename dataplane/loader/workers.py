"""Worker processes that read steps ahead into shared memory.

Worker w of n reads every n-th group of a rank, in order, into its own slots. The consumer takes
groups from the workers in turn, so the order is the same as without workers.

Batches are views of a slot: nothing is copied. A slot returns to its worker when the last array in
it is garbage-collected, so data in use is never overwritten. A consumer that holds more slots than
a worker can spare gets copies instead.

The memory is an unlinked file: it is freed when the processes end. Workers are forks of a process
that has imported what they need (`fork_server`).
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection, Pipe

import numpy as np

from ...console.errors import RunError, StorageError
from ..arrays import Bytes
from ..datasets.cache import Cache
from . import fork_server
from .rank_rows import RankReader, RankRows, RowGroup
from .rows import RowArrays

SLOTS = 4
"""Slots of a worker."""
SENT_BYTES = 4 << 20
"""Bytes of the arrays of a group. Sending a group costs as much as reading a few rows, so groups
are twice as large as without workers. (Containers often have only 64 MiB of shared memory.)"""
LENT = 2
"""Slots that the consumer may hold: one in use, and the next. Of the others, one is ready and one
is being filled."""


@dataclass(frozen=True)
class _Job:
    """The rows that a worker reads, and the layout of its shared memory."""

    rank_rows: RankRows
    cache: Cache | None
    turn: int
    turns: int
    slot_bytes: int

    @property
    def groups(self) -> Iterator[range]:
        return self.rank_rows.groups(self.turn, self.turns)

    def arrays(self, slot: Bytes, group: range) -> RowArrays:
        """Return a group's arrays as views of a slot."""
        rows, length = self.rank_rows.shape(group)
        middle = rows * (length + 1) * 8
        tokens = slot[:middle].view(np.int64)
        weights = slot[middle : middle + rows * length * 4].view(np.float32)
        return RowArrays(tokens.reshape(rows, length + 1), weights.reshape(rows, length))

    def slots(self, descriptor: int) -> list[memoryview]:
        view, size = memoryview(mmap.mmap(descriptor, self.memory_bytes)), self.slot_bytes
        return [view[slot * size : (slot + 1) * size] for slot in range(SLOTS)]

    @property
    def memory_bytes(self) -> int:
        return SLOTS * self.slot_bytes


def read_ahead(rank_rows: RankRows, workers: int, cache: Cache | None) -> Iterator[RowGroup]:
    """Yield all groups of a rank, read ahead by worker processes."""
    slot_bytes = rank_rows.most_bytes + -rank_rows.most_bytes % 8
    readers: list[_Worker] = []
    try:
        for turn in range(workers):
            readers.append(_Worker(_Job(rank_rows, cache, turn, workers, slot_bytes)))
        for reader, group in zip(cycle(readers), rank_rows.groups(), strict=False):
            yield reader.receive(group)
    finally:
        for reader in readers:
            reader.end()


class _Worker:
    """The consumer's side of a worker."""

    def __init__(self, job: _Job) -> None:
        self.job = job
        self.connection, theirs = Pipe()
        with tempfile.TemporaryFile(dir=_memory_folder()) as file, theirs:
            memory = file.fileno()
            _reserve(memory, job.memory_bytes)
            try:
                self.process = fork_server.start(theirs.fileno(), memory)
            except OSError as error:
                raise RunError(f"cannot start a loader worker: {error.strerror}") from None
            self.slots = job.slots(memory)
        # A finalizer: at interpreter exit a generator is closed too late.
        self.end = weakref.finalize(self, _end, self.process, self.connection)
        self.lent = 0
        self.returned: deque[int] = deque()
        """Slots without live arrays; finalizers append to it from any thread."""
        with suppress(ConnectionError):  # `receive` reports a worker that died
            self.connection.send(fork_server.Place.here())
            self.connection.send(_Work(job))

    def receive(self, group: range) -> RowGroup:
        try:
            self._return_slots()
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            raise RunError(
                f"a loader worker died (exit code {self.process.exit_code()}) at step {group[0]}",
                hint="if it ran out of memory, use fewer workers",
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        slot, labels = answer
        return RowGroup(group, self.job.arrays(self._lend(slot), group), labels)

    def _lend(self, slot: int) -> Bytes:
        """Return the memory of a slot, lent until its last view is collected; or a copy of it."""
        self.lent += 1
        memory = np.frombuffer(self.slots[slot], np.uint8)
        if self.lent > LENT:
            self.returned.append(slot)
            return memory.copy()
        # Every view, and every tensor over a view, references this array, whose own base is None.
        weakref.finalize(memory, self.returned.append, slot).atexit = False
        return memory

    def _return_slots(self) -> None:
        slots = bytes(self.returned.popleft() for _ in range(len(self.returned)))
        if slots:
            self.lent -= len(slots)
            self.connection.send_bytes(slots)


def _end(process: fork_server.Worker, connection: Connection) -> None:
    connection.close()
    process.end()


@dataclass
class _Work:
    """The function that a worker process runs."""

    job: _Job

    def __call__(self, connection: Connection, memory: int) -> None:
        slots = self.job.slots(memory)
        os.close(memory)
        try:
            try:
                self._read(connection, [np.frombuffer(slot, np.uint8) for slot in slots])
            except Exception as error:  # any error is sent to the consumer, which raises it
                connection.send(error)
            while True:  # the consumer may still read the last group, or the error
                connection.recv_bytes()
        except (EOFError, ConnectionError):
            return  # the consumer has ended

    def _read(self, connection: Connection, slots: list[Bytes]) -> None:
        job, free = self.job, list(range(SLOTS))
        with closing(RankReader(job.rank_rows, job.cache, job.turn, job.turns)) as reader:
            for group in job.groups:
                while not free or connection.poll():
                    free += connection.recv_bytes()
                slot = free.pop()  # the last one used is still in the processor's cache
                read = reader.read(group, job.arrays(slots[slot], group))
                connection.send((slot, read.labels))


def _reserve(descriptor: int, size: int) -> None:
    """Allocate the memory now: writing to a page that cannot be allocated kills the process."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise StorageError(
            f"cannot allocate {size >> 20} MiB of memory for a loader worker: {error.strerror}",
            where=_memory_folder(),
            hint="enlarge /dev/shm (docker: --shm-size), or use fewer workers",
        ) from None


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
