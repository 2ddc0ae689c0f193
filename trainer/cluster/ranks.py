"""A rank of a run: it joins the process group and sends heartbeats to the launcher.

Under torchrun (or any launcher that sets RANK and WORLD_SIZE) the command itself is a rank: it
starts no processes and sends no heartbeats.
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
"""Exit code of a run that saved and stopped early: start it again."""

STORE_FD = "HEADRACE_STORE_FD"
WATCH = "HEADRACE_WATCH"


def threads_per_rank(processes: int, available: int | None = None) -> int:
    """Return the threads of each rank, so that the ranks of this machine use all of its cores."""
    return max(1, (available or cores()) // processes)


def joined() -> bool:
    """Return True if a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Return True on rank 0, which alone prints and writes."""
    return int(os.environ.get("RANK", 0)) == 0


@dataclass
class Failure:
    """The error that ended a rank, as the rank reports it."""

    rank: int
    time: float
    error: UserError | None
    text: str


class Watched:
    """Heartbeats and the final error of a rank, written for the launcher that started it."""

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
        """Report progress: the start of a step, or of a stage of the start-up."""
        if self.folder is not None:
            (self.folder / f"beat.{self.rank}").write_text(what)

    def fail(self, error: BaseException) -> None:
        """Write the error that ends this rank."""
        if self.folder is None:
            return
        mine = error if isinstance(error, UserError) else None
        text = "".join(traceback.format_exception(error))
        failure = Failure(self.rank, time.time(), mine, text)
        temporary = self.folder / f".failure.{self.rank}"
        temporary.write_bytes(pickle.dumps(failure))
        temporary.rename(self.folder / f"failure.{self.rank}")


def initialise(backend: str, timeout: timedelta) -> None:
    """Join the process group of the environment, or make a group of one rank."""
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
        # The launcher has already bound the port, so no other program can take it.
        master_listen_fd=int(fd) if fd else None,
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def failures_in(watch: Path) -> list[Failure]:
    """Return the failures that ranks have written, earliest first."""
    failures: list[Failure] = [pickle.loads(p.read_bytes()) for p in watch.glob("failure.*")]
    return sorted(failures, key=lambda failure: failure.time)


def _die_with_parent() -> None:
    """Ask the kernel for SIGTERM when the launcher dies: the rank saves and frees the lock."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGTERM)
