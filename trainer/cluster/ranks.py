"""Run a process as a rank: join the process group, send heartbeats to the launcher.

Under torchrun (or any launcher that sets RANK and WORLD_SIZE) the command itself is a rank: it
starts no processes, and watches its heartbeats itself.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from ...console.errors import RunError, UserError
from ...console.machine import cores
from .hangs import is_waiting
from .lost_ranks import Ports
from .rendezvous import Meeting, meet, report_absence, wait_for_readers

if TYPE_CHECKING:
    import torch

INTERRUPTED = 85
"""Exit code for a run that saved and stopped early: start it again."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""Signals that ask a run to save and stop."""

STORE_FD, LOCK_FD = "HEADRACE_STORE_FD", "HEADRACE_LOCK_FD"
"""Rank 0's environment variables with its descriptors for the store's socket and the run's lock."""
WATCH = "HEADRACE_WATCH"
"""Environment variable with the folder in which a rank writes for its launcher."""
CRASH = "crash"
"""In that folder, the file CRASH.RANK has the stacks of a rank that died of SIGSEGV or its kin."""
PARENT = "HEADRACE_PARENT"
"""Environment variable with the id of the process that started a rank and watches it."""
HANG_HINT = (
    "the same command resumes from the last checkpoint; a longer watch.stall_seconds allows slower "
    "steps and a slower start"
)
TORCHRUN = "TORCHELASTIC_USE_AGENT_STORE"
"""Torchrun's environment variable: it has a store and ends all ranks if any fails."""
LAST_WORDS = 10.0
"""Seconds that a rank leaves its peers to write their stacks, before it ends a hanging run."""


def threads_per_rank(processes: int, available: int | None = None) -> int:
    """Return threads per rank, so that this machine's ranks use all cores."""
    return max(1, (available or cores()) // processes)


def is_rank() -> bool:
    """Return whether a launcher started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_first() -> bool:
    """Return whether this is rank 0, which alone prints and writes."""
    return int(os.environ.get("RANK", 0)) == 0


class StopRequest:
    """True once SIGTERM or SIGUSR1 has requested that the run saves and stops."""

    def __init__(self) -> None:
        self.received = False
        for number in STOP_SIGNALS:
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = True

    def __call__(self) -> bool:
        return self.received


class StopBeforeRanks(StopRequest):
    """Exits at once on SIGTERM or SIGUSR1: no rank has started, so there is nothing to save."""

    def _handle(self, number: int, frame: FrameType | None) -> None:
        sys.stderr.write(
            "stopped before the first step; the same command starts it again "
            f"(exit code {INTERRUPTED})\n"
        )
        sys.exit(INTERRUPTED)


@contextlib.contextmanager
def handle_stop_signals() -> Iterator[StopRequest]:
    """Handle SIGTERM and SIGUSR1 in the command that starts a run. A rank keeps its handlers until
    it has ended: a signal after its last step must not change its exit code."""
    previous_handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        yield StopRequest() if is_rank() else StopBeforeRanks()
    finally:
        if not is_rank():
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)


@dataclass
class Failure:
    """A rank's report of the error that ended it."""

    rank: int
    time: float
    error: UserError | None
    text: str


class Watched:
    """Writes a rank's heartbeats and final error for the launcher that started it."""

    def __init__(self) -> None:
        folder = os.environ.get(WATCH)
        self.folder = Path(folder) if folder else None
        self.rank = int(os.environ.get("RANK", 0))
        self.last_beat = "start", time.monotonic()
        """Activity and time."""
        self.ports_by_rank: list[Ports] = []
        """Socket ports by rank; empty until the groups are connected."""
        if self.folder is None:
            return
        import faulthandler

        _die_with_launcher()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher decides what Ctrl-C means
        self.crash = (self.folder / f"{CRASH}.{self.rank}").open("w")
        faulthandler.enable(self.crash)
        self.stack = (self.folder / f"stack.{self.rank}").open("w")
        faulthandler.register(signal.SIGUSR2, file=self.stack, all_threads=False)
        self.beat("start")

    def beat(self, activity: str) -> None:
        """Report progress: a step or a stage in the start-up begins."""
        self.last_beat = activity, time.monotonic()
        if self.folder is not None:
            (self.folder / f"beat.{self.rank}").write_text(activity)

    @contextlib.contextmanager
    def watching_itself(self, stall_seconds: float, rank_name: str) -> Iterator[None]:
        """Print all threads' stacks and end this process if it makes no progress: an external
        launcher does not watch heartbeats. Print the stacks, too, if a signal such as SIGSEGV kills
        the process."""
        import faulthandler

        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(min(1.0, stall_seconds / 4)):
                activity, since = self.last_beat
                if time.monotonic() - since >= stall_seconds:
                    self._end_stalled(rank_name, activity, stall_seconds)

        if self.folder is None:
            faulthandler.enable(2)
        if stall_seconds and self.folder is None:
            threading.Thread(target=watch, name="watch", daemon=True).start()
        try:
            yield
        finally:
            ended.set()

    def _end_stalled(self, rank_name: str, activity: str, seconds: float) -> None:
        import faulthandler

        waits = "waits for other ranks" if is_waiting() else "waits for no other rank"
        error = RunError(
            f"{rank_name} has made no progress for {seconds:.0f} seconds ({activity}); it {waits}",
            hint=HANG_HINT,
        )
        sys.stderr.write(f"error: {error}\n")
        faulthandler.dump_traceback()
        time.sleep(LAST_WORDS)
        os._exit(1)

    def fail(self, error: BaseException) -> None:
        """Write the error that ends this rank."""
        if self.folder is None:
            return
        user_error = error if isinstance(error, UserError) else None
        text = "".join(traceback.format_exception(error))
        failure = Failure(self.rank, time.monotonic(), user_error, text)
        temporary = self.folder / f".failure.{self.rank}"
        temporary.write_bytes(pickle.dumps(failure))
        temporary.rename(self.folder / f"failure.{self.rank}")


def initialise(
    backend: str,
    timeout: timedelta,
    join: timedelta | None = None,
    device: torch.device | None = None,
) -> None:
    """Join the process group that the environment describes, or create a group with one rank. Under
    a launcher that may not watch its ranks, all must arrive within `join` (default: `timeout`).

    A rank with a GPU passes its `device`: NCCL then connects once, and every later group is split
    from that communicator.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

    options: dict[str, Any] = {"timeout": timeout}
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device
    if not is_rank():
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, **options)
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get(TORCHRUN) == str(True):
        dist.init_process_group(backend, **options)
        return
    if WATCH not in os.environ:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        store = meet(host, port, rank, world, join or timeout)
        store.set_timeout(timeout)
    else:
        fd = os.environ.get(STORE_FD)
        store = TCPStore(
            "127.0.0.1",
            int(os.environ["MASTER_PORT"]),
            world,
            is_master=rank == 0,
            timeout=timeout,
            # The launcher has already bound the port, so no other program can take it.
            master_listen_fd=int(fd) if fd else None,
        )
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, **options)


@contextlib.contextmanager
def recording_failure() -> Iterator[None]:
    """Record the error that ends the block, for ranks that may still wait for this rank."""
    try:
        yield
    except Exception as error:
        Meeting.failure = error.message if isinstance(error, UserError) else _one_line(error)
        raise


def report_failure() -> None:
    """Report the recorded error to all ranks, if this rank failed before the rendezvous. Rank 0
    waits until they have read it. A launcher that watches its ranks ends them itself."""
    if not is_rank() or WATCH in os.environ or os.environ.get(TORCHRUN) == str(True):
        return
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if Meeting.failure is None or world == 1:
        return
    with contextlib.suppress(Exception):  # there is no rank 0, or it has ended
        if not Meeting.begun:
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            report_absence(host, port, rank, world, Meeting.failure)
        wait_for_readers()


def _one_line(error: Exception) -> str:
    from click import ClickException  # ranks need it for no other purpose

    message = error.format_message() if isinstance(error, ClickException) else str(error)
    return message or type(error).__name__


def read_failures(folder: Path) -> list[Failure]:
    """Read the failures that ranks have written, earliest first."""
    failures: list[Failure] = [pickle.loads(p.read_bytes()) for p in folder.glob("failure.*")]
    return sorted(failures, key=lambda failure: failure.time)


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the process that started this one dies."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _die_with_launcher() -> None:
    """End when the launcher dies, and the rank's parent with it: a rank that went on alone would
    keep the run's lock."""
    die_with_parent()
    if os.getppid() != int(os.environ[PARENT]):  # it has died already
        os._exit(1)
