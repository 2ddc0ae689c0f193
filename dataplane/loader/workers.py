"""Worker processes that read steps ahead into shared memory.

Worker w of n reads every n-th group of a share, in order, into slots of its own, and the consumer
takes turns: the order is that of no workers at all.

What the consumer hands on still lies in a slot: nothing is copied. The slot goes back to its
worker when the last array in it dies, so that what somebody holds is never overwritten. Of whoever
holds more than a worker can spare, copies are made instead.

The memory is an unlinked file: when the processes are gone, it is gone.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import cycle
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

from ...console.errors import RunError, StorageError
from ...console.signals import deaf
from ..arrays import Bytes
from ..datasets.cache import Cache
from .rank_rows import RowGroup, Share, ShareReader
from .rows import RowArrays

SLOTS = 4
"""Of each worker."""
SENT_BYTES = 4 << 20
"""Of the arrays of a group: to send one costs as much as to read a few rows, so that it is twice as
large as without workers. (A container often has no more than 64 MiB of shared memory.)"""
LENT = 2
"""As many as the consumer may hold of them: one that is still in use, and the next. The others are
one that is ready and one that is being filled."""


@dataclass(frozen=True)
class _Job:
    """What a worker and its consumer agree on: what is read, and how it lies in shared memory."""

    share: Share
    cache: Cache | None
    turn: int
    turns: int
    slot_bytes: int

    @property
    def groups(self) -> Iterator[range]:
        return self.share.groups(self.turn, self.turns)

    def arrays(self, slot: Bytes, group: range) -> RowArrays:
        """A group's arrays in a slot."""
        rows, length = self.share.shape(group)
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


def read_ahead(share: Share, workers: int, cache: Cache | None) -> Iterator[RowGroup]:
    """All groups of a share, read by so many workers."""
    slot_bytes = share.most_bytes + -share.most_bytes % 8
    readers: list[_Worker] = []
    try:
        for turn in range(workers):
            readers.append(_Worker(_Job(share, cache, turn, workers, slot_bytes)))
        for reader, group in zip(cycle(readers), share.groups(), strict=False):
            yield reader.receive(group)
    finally:
        for reader in readers:
            reader.end()


class _Worker:
    """A worker as its consumer sees it."""

    def __init__(self, job: _Job) -> None:
        context = multiprocessing.get_context("spawn")
        self.job = job
        with tempfile.TemporaryFile(dir=_memory_folder()) as file:
            _reserve(file.fileno(), job.memory_bytes)
            self.connection, theirs = context.Pipe()
            self.process = context.Process(
                target=_Work(job, theirs, file.fileno()),
                name=f"headrace-loader-{job.turn}",
                daemon=True,
            )
            with deaf():
                self.process.start()
            theirs.close()
            self.slots = job.slots(file.fileno())
        self.lent = 0
        self.returned: deque[int] = deque()
        """Slots in which nothing is alive any more: arrays die in any thread, at any time."""
        # A finalizer, because at the interpreter's exit a generator is closed too late.
        self.end = weakref.finalize(self, _end, self.process, self.connection)

    def receive(self, group: range) -> RowGroup:
        try:
            self._give_back()
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            raise RunError(
                f"a loader worker died (exit code {self.process.exitcode}) at step {group[0]}",
                hint="if it was killed for memory, use fewer workers; if it could not import your "
                'script, begin that with `if __name__ == "__main__":`',
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        slot, labels = answer
        return RowGroup(group, self.job.arrays(self._lend(slot), group), labels)

    def _lend(self, slot: int) -> Bytes:
        """A slot's memory, and a promise that its worker will not touch it; or a copy."""
        self.lent += 1
        memory = np.frombuffer(self.slots[slot], np.uint8)
        if self.lent > LENT:
            self.returned.append(slot)
            return memory.copy()
        # Every view of it, and every tensor over one, holds this very array: its own base is none.
        weakref.finalize(memory, self.returned.append, slot).atexit = False
        return memory

    def _give_back(self) -> None:
        slots = bytes(self.returned.popleft() for _ in range(len(self.returned)))
        if slots:
            self.lent -= len(slots)
            self.connection.send_bytes(slots)


def _end(process: BaseProcess, connection: Connection) -> None:
    connection.close()
    process.terminate()
    process.join()


@dataclass
class _Work:
    """What a worker process runs."""

    job: _Job
    connection: Connection
    descriptor: int

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "descriptor": DupFd(self.descriptor)}

    def __call__(self) -> None:
        descriptor: Any = self.descriptor
        slots = self.job.slots(descriptor.detach())
        try:
            try:
                self._read([np.frombuffer(slot, np.uint8) for slot in slots])
            except Exception as error:  # whatever it is, the consumer must hear of it
                self.connection.send(error)
            while True:  # the memory must outlive the last group, and the connection the error
                self.connection.recv_bytes()
        except (EOFError, ConnectionError):
            return  # the consumer is gone

    def _read(self, slots: list[Bytes]) -> None:
        job, free = self.job, list(range(SLOTS))
        with closing(ShareReader(job.share, job.cache, job.turn, job.turns)) as reader:
            for group in job.groups:
                while not free or self.connection.poll():
                    free += self.connection.recv_bytes()
                slot = free.pop()  # the one used last is still in the processor's cache
                read = reader.read(group, job.arrays(slots[slot], group))
                self.connection.send((slot, read.labels))


def _reserve(descriptor: int, size: int) -> None:
    """Have the memory now: a page that is not there when it is written to kills its process."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise StorageError(
            f"no shared memory for a loader worker: {size >> 20} MiB ({error.strerror})",
            where=_memory_folder(),
            hint="enlarge /dev/shm (docker: --shm-size), or use fewer workers",
        ) from None


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
