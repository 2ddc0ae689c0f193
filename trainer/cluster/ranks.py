"""A process of a run: it joins the others, and tells the launcher how it fares.

Under torchrun (or any launcher that sets RANK and WORLD_SIZE) the command itself is one: it starts
nothing, and has nobody to tell.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from ...console.errors import UserError
from ...console.machine import cores

INTERRUPTED = 85
"""The exit code of a run that saved and made room: start it again."""

STORE_FD = "HEADRACE_STORE_FD"
WATCH = "HEADRACE_WATCH"


def threads_per_rank(processes: int, available: int | None = None) -> int:
    """Return the threads of each rank, so that the ranks of this machine use all of its cores."""
    return max(1, (available or cores()) // processes)


def joined() -> bool:
    """Whether another launcher has started this process as one of a group."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def speaks() -> bool:
    """Whether this process is the one that talks and writes: of a group, rank 0."""
    return int(os.environ.get("RANK", 0)) == 0


@dataclass
class Failure:
    """What a process says of its own end."""

    rank: int
    time: float
    error: UserError | None
    text: str


class Watched:
    """What a process that a launcher started tells it."""

    def __init__(self) -> None:
        folder = os.environ.get(WATCH)
        self.folder = Path(folder) if folder else None
        self.rank = int(os.environ.get("RANK", 0))
        if self.folder is None:
            return
        import faulthandler

        _die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
        self.stack = (self.folder / f"stack.{self.rank}").open("w")
        faulthandler.register(signal.SIGUSR2, file=self.stack, all_threads=False)
        self.beat("start")

    def beat(self, what: str) -> None:
        """Say that something has begun: a part of the start, or a step."""
        if self.folder is not None:
            (self.folder / f"beat.{self.rank}").write_text(what)

    def fail(self, error: BaseException) -> None:
        """Leave the reason of this process's end."""
        if self.folder is None:
            return
        mine = error if isinstance(error, UserError) else None
        text = "".join(traceback.format_exception(error))
        failure = Failure(self.rank, time.time(), mine, text)
        temporary = self.folder / f".failure.{self.rank}"
        temporary.write_bytes(pickle.dumps(failure))
        temporary.rename(self.folder / f"failure.{self.rank}")


def initialise(backend: str, timeout: timedelta) -> None:
    """Join the group that the environment names; alone, be a group of one."""
    import torch.distributed as dist
    from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

    if not joined():
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if WATCH not in os.environ:
        dist.init_process_group(backend, timeout=timeout)
        return
    fd = os.environ.get(STORE_FD)
    store: Store = TCPStore(
        "127.0.0.1",
        int(os.environ["MASTER_PORT"]),
        world,
        is_master=rank == 0,
        timeout=timeout,
        # The launcher has bound the port already: no other program can take it in between.
        master_listen_fd=int(fd) if fd else None,
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def failures_in(watch: Path) -> list[Failure]:
    """What processes have left there, the first one first."""
    found: list[Failure] = [pickle.loads(p.read_bytes()) for p in watch.glob("failure.*")]
    return sorted(found, key=lambda failure: failure.time)


def _die_with_parent() -> None:
    """Ask the kernel for a SIGTERM when the launcher is gone: save, and leave the run's lock."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
