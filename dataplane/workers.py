"""Worker processes that read steps ahead into shared memory.

Worker w of n reads every n-th step, in order, into slots of its own; the consumer takes turns, so
the order is that of no workers at all. A slot is handed back when the consumer asks for the step
after, so that nothing is copied on the way. The memory is an unlinked file: when the processes are
gone, it is gone.
"""

from __future__ import annotations

import mmap
import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import DupFd
from typing import TYPE_CHECKING, Any

import numpy as np

from ..console.errors import RunError
from .rows import RowArrays, RowReader

if TYPE_CHECKING:
    from .loader import Loader, RankRows

SLOTS = 3
"""Of each worker: one with the consumer, one ready, one being filled."""


@dataclass(frozen=True)
class _Memory:
    """How a worker finds the shared memory: a file descriptor, and the size of a slot."""

    descriptor: Any
    rows: int
    length: int

    @property
    def slot_bytes(self) -> int:
        return self.rows * ((self.length + 1) * 8 + self.length * 4)

    def slots(self, descriptor: int) -> list[bytearray | memoryview]:
        view = memoryview(mmap.mmap(descriptor, SLOTS * self.slot_bytes))
        return [
            view[slot * self.slot_bytes : (slot + 1) * self.slot_bytes] for slot in range(SLOTS)
        ]


def read_ahead(loader: Loader) -> Iterator[RankRows]:
    """What the loader would read, read by its workers."""
    sizes = [
        (loader.micro_batch_count(step) * loader.micro_batch, step.phase.seq_len)
        for step in (loader.plan.step(phase.first_step) for phase in loader.plan.phases)
    ]
    rows = max(rows * (length + 1) for rows, length in sizes)
    context = multiprocessing.get_context("spawn")
    workers: list[tuple[Any, Connection, list[Any]]] = []
    try:
        for number in range(loader.workers):
            with tempfile.TemporaryFile(dir=_memory_folder()) as file:
                memory = _Memory(None, 1, rows)
                os.ftruncate(file.fileno(), SLOTS * memory.slot_bytes)
                ours, theirs = context.Pipe()
                arguments = (loader, number, theirs, memory, file.fileno())
                process = context.Process(
                    target=_Work(*arguments), name=f"headrace-loader-{number}", daemon=True
                )
                process.start()
                theirs.close()
                workers.append((process, ours, memory.slots(file.fileno())))
        for turn, number in enumerate(loader.steps):
            process, connection, slots = workers[turn % loader.workers]
            try:
                answer = connection.recv()
                if isinstance(answer, BaseException):
                    raise answer
                slot, read, shape = answer
                arrays = _arrays(slots[slot], *shape)
                yield replace(read, tokens=arrays.tokens, weights=arrays.weights)
                connection.send(slot)
            except (EOFError, ConnectionError):
                process.join()
                raise RunError(
                    f"a loader worker died (exit code {process.exitcode}) at step {number}",
                    mend="if it was killed for memory, use fewer workers",
                ) from None
    finally:
        for process, connection, _ in workers:
            connection.close()
            process.terminate()
            process.join()


class _Work:
    """What a worker process runs."""

    def __init__(
        self,
        loader: Loader,
        number: int,
        connection: Connection,
        memory: _Memory,
        descriptor: int,
    ) -> None:
        self.loader, self.number, self.connection = loader, number, connection
        self.memory, self.descriptor = memory, descriptor

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "descriptor": DupFd(self.descriptor)}

    def __call__(self) -> None:
        loader, connection = self.loader, self.connection
        free = list(range(SLOTS))
        slots = self.memory.slots(self.descriptor.detach())  # type: ignore[attr-defined]
        try:
            reader = RowReader(loader.plan, cache=loader.cache)
            for number in loader.steps[self.number :: loader.workers]:
                while not free or connection.poll():
                    free.append(connection.recv())
                step = loader.plan.step(number)
                shape = (
                    loader.micro_batch_count(step) * loader.micro_batch,
                    step.phase.seq_len,
                )
                slot = free.pop(0)
                read = loader.read(reader, number, _arrays(slots[slot], *shape))
                light = replace(read, tokens=np.empty(0, np.int64), weights=np.empty(0, np.float32))
                connection.send((slot, light, shape))
            while True:  # the memory must outlive the last step
                connection.recv()
        except (EOFError, ConnectionError):
            return  # the consumer is gone
        except Exception as error:  # whatever it is, the consumer must hear of it
            connection.send(error)


def _arrays(slot: Any, rows: int, length: int) -> RowArrays:
    tokens = np.frombuffer(slot, np.int64, rows * (length + 1)).reshape(rows, length + 1)
    weights = np.frombuffer(slot, np.float32, rows * length, rows * (length + 1) * 8)
    return RowArrays(tokens, weights.reshape(rows, length))


def _memory_folder() -> str | None:
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
