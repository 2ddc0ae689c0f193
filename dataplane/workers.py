"""Worker processes that read steps ahead into shared memory.

Steps are read in groups; worker w of n reads every n-th group, in order, into slots of its own,
and the consumer takes turns: the order is that of no workers at all.

What the consumer hands on still lies in a slot: nothing is copied. The slot goes back to its
worker when the last array in it dies, so that what somebody holds is never overwritten. Of whoever
holds more than a worker can spare, copies are made instead.

The memory is an unlinked file: when the processes are gone, it is gone.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import tempfile
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd
from typing import Any

import numpy as np

from ..console.errors import RunError, StorageError
from .loader import Loader, RankRows
from .rows import RowArrays
from .shard_file import Bytes

SLOTS = 4
"""Of each worker."""
LENT = 2
"""As many as the consumer may hold of them: one whose last step is still in use, and the next. The
others are one that is ready and one that is being filled."""
GROUP_BYTES = 4 << 20
"""A message costs as much as reading a few rows, so that short steps share one. The first groups
are short, because somebody waits for them."""


@dataclass(frozen=True)
class _Shapes:
    """How steps lie in shared memory: what a worker and its consumer must agree on."""

    loader: Loader

    @cached_property
    def slot_bytes(self) -> int:
        plan = self.loader.plan
        steps = [self.step_bytes(phase.first_step) for phase in plan.phases]
        return max(GROUP_BYTES, *steps)

    def shape(self, number: int) -> tuple[int, int]:
        """Rows and sequence length of a step, padding included."""
        step = self.loader.plan.step(number)
        rows = self.loader.micro_batch_count(step) * self.loader.micro_batch
        return rows, step.phase.seq_len

    def step_bytes(self, number: int) -> int:
        rows, length = self.shape(number)
        size = rows * ((length + 1) * 8 + length * 4)
        return size + -size % 8  # the next step's tokens begin where an int64 may

    def groups(self) -> Iterator[range]:
        """All steps, in groups of one phase that fit a slot."""
        limit = 1
        for phase in self.loader.plan.phases:
            first = max(phase.first_step, self.loader.start_step)
            last = phase.first_step + phase.steps
            while first < last:
                fit = max(1, self.slot_bytes // self.step_bytes(first))
                yield range(first, min(first + min(limit, fit), last))
                first += min(limit, fit)
                limit = min(2 * limit, fit)

    def arrays(self, slot: Bytes, group: range) -> list[RowArrays]:
        """A group's arrays in a slot."""
        rows, length = self.shape(group[0])
        size, middle = self.step_bytes(group[0]), rows * (length + 1) * 8
        end = middle + rows * length * 4
        found = []
        for at in range(0, len(group) * size, size):
            tokens = slot[at : at + middle].view(np.int64)
            weights = slot[at + middle : at + end].view(np.float32)
            found.append(RowArrays(tokens.reshape(rows, -1), weights.reshape(rows, -1)))
        return found

    def slots(self, descriptor: int) -> list[memoryview]:
        view = memoryview(mmap.mmap(descriptor, self.memory_bytes))
        size = self.memory_bytes // SLOTS
        return [view[slot * size : (slot + 1) * size] for slot in range(SLOTS)]

    @property
    def memory_bytes(self) -> int:
        return SLOTS * self.slot_bytes


def read_ahead(loader: Loader) -> Iterator[RankRows]:
    """What the loader would read, read by its workers."""
    shapes = _Shapes(loader)
    workers: list[_Worker] = []
    try:
        for number in range(loader.workers):
            workers.append(_Worker(shapes, number))
        for turn, group in enumerate(shapes.groups()):
            yield from workers[turn % loader.workers].receive(group)
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A worker as its consumer sees it."""

    def __init__(self, shapes: _Shapes, number: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.shapes = shapes
        with tempfile.TemporaryFile(dir=_memory_folder()) as file:
            _reserve(file.fileno(), shapes.memory_bytes)
            self.connection, theirs = context.Pipe()
            work = _Work(shapes, number, theirs, file.fileno())
            self.process = context.Process(
                target=work, name=f"headrace-loader-{number}", daemon=True
            )
            self.process.start()
            theirs.close()
            self.slots = shapes.slots(file.fileno())
        self.lent = 0
        self.returned: deque[int] = deque()
        """Slots in which nothing is alive any more: arrays die in any thread, at any time."""
        # A finalizer, because at the interpreter's exit a generator is closed too late.
        self.end = weakref.finalize(self, _end, self.process, self.connection)

    def receive(self, group: range) -> Iterator[RankRows]:
        try:
            self._give_back()
            answer = self.connection.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            raise RunError(
                f"a loader worker died (exit code {self.process.exitcode}) at step {group[0]}",
                mend="if it was killed for memory, use fewer workers",
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        slot, labels = answer
        return map(RankRows, self.shapes.arrays(self._lend(slot), group), labels)

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

    shapes: _Shapes
    number: int
    connection: Connection
    descriptor: int

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "descriptor": DupFd(self.descriptor)}

    def __call__(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all: it is not ours
        descriptor: Any = self.descriptor
        slots = self.shapes.slots(descriptor.detach())
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
        loader, free = self.shapes.loader, list(range(SLOTS))
        with loader.reading(number for group in self._groups() for number in group) as read:
            for group in self._groups():
                while not free or self.connection.poll():
                    free += self.connection.recv_bytes()
                slot = free.pop(0)
                arrays = self.shapes.arrays(slots[slot], group)
                labels = [
                    read(number, into).labels for number, into in zip(group, arrays, strict=True)
                ]
                self.connection.send((slot, labels))

    def _groups(self) -> Iterator[range]:
        return islice(self.shapes.groups(), self.number, None, self.shapes.loader.workers)


def _reserve(descriptor: int, size: int) -> None:
    """Have the memory now: a page that is not there when it is written to kills its process."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        raise StorageError(
            f"no shared memory for a loader worker: {size >> 20} MiB ({error.strerror})",
            where=_memory_folder(),
            mend="enlarge /dev/shm (docker: --shm-size), or use fewer workers",
        ) from None


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
