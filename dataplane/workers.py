"""Worker processes that read steps ahead into shared memory.

Steps are read in groups; worker w of n reads every n-th group, in order, into slots of its own,
and the consumer takes turns: the order is that of no workers at all. The consumer copies a group
out of its slot and gives the slot back, so that what it hands on is nobody else's. The memory is
an unlinked file: when the processes are gone, it is gone.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any

import numpy as np

from ..console.errors import RunError, StorageError
from .rows import RowArrays

if TYPE_CHECKING:
    from .loader import Loader, RankRows

SLOTS = 3
"""Of each worker: one being copied, one ready, one being filled."""
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

    def groups(self) -> Iterator[list[int]]:
        """All steps, in groups that fit a slot."""
        group: list[int] = []
        size, limit = 0, 1
        for number in self.loader.steps:
            cost = self.step_bytes(number)
            if group and (size + cost > self.slot_bytes or len(group) >= limit):
                yield group
                group, size, limit = [], 0, limit * 2
            group.append(number)
            size += cost
        if group:
            yield group

    def arrays(self, slot: memoryview, group: list[int]) -> list[RowArrays]:
        """A group's arrays in a slot."""
        found, at = [], 0
        for number in group:
            rows, length = self.shape(number)
            tokens = np.frombuffer(slot, np.int64, rows * (length + 1), at)
            at += tokens.nbytes
            weights = np.frombuffer(slot, np.float32, rows * length, at)
            at += weights.nbytes + -weights.nbytes % 8
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
    context = multiprocessing.get_context("spawn")
    workers: list[tuple[Any, Connection, list[memoryview]]] = []
    try:
        for number in range(loader.workers):
            with tempfile.TemporaryFile(dir=_memory_folder()) as file:
                _reserve(file.fileno(), shapes.memory_bytes)
                ours, theirs = context.Pipe()
                work = _Work(shapes, number, theirs, file.fileno())
                process = context.Process(
                    target=work, name=f"headrace-loader-{number}", daemon=True
                )
                process.start()
                theirs.close()
                workers.append((process, ours, shapes.slots(file.fileno())))
        for turn, group in enumerate(shapes.groups()):
            process, connection, slots = workers[turn % loader.workers]
            try:
                answer = connection.recv()
                if isinstance(answer, BaseException):
                    raise answer
                slot, light = answer
                arrays = shapes.arrays(slots[slot], group)
                steps = [
                    replace(read, tokens=held.tokens.copy(), weights=held.weights.copy())
                    for read, held in zip(light, arrays, strict=True)
                ]
                connection.send(slot)
            except (EOFError, ConnectionError):
                process.join()
                raise RunError(
                    f"a loader worker died (exit code {process.exitcode}) at step {group[0]}",
                    mend="if it was killed for memory, use fewer workers",
                ) from None
            yield from steps
    finally:
        for process, connection, _ in workers:
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
        descriptor: Any = self.descriptor
        slots = self.shapes.slots(descriptor.detach())
        try:
            self._read(slots)
            while True:  # the memory must outlive the last group
                self.connection.recv()
        except (EOFError, ConnectionError):
            return  # the consumer is gone
        except Exception as error:  # whatever it is, the consumer must hear of it
            self.connection.send(error)

    def _read(self, slots: list[memoryview]) -> None:
        loader, free = self.shapes.loader, list(range(SLOTS))
        no_tokens, no_weights = np.empty((0, 0), np.int64), np.empty((0, 0), np.float32)
        with loader.reading(number for group in self._groups() for number in group) as read:
            for group in self._groups():
                while not free or self.connection.poll():
                    free.append(self.connection.recv())
                slot = free.pop(0)
                arrays = self.shapes.arrays(slots[slot], group)
                rows = [
                    replace(read(number, into), tokens=no_tokens, weights=no_weights)
                    for number, into in zip(group, arrays, strict=True)
                ]
                self.connection.send((slot, rows))

    def _groups(self) -> Iterator[list[int]]:
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
