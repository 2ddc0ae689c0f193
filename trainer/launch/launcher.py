"""Start the ranks of a run on this machine and watch them.

    launcher ──┬─ rank 0 ─┐
               ├─ rank 1 ─┤  one process group
               └─ …      ─┘

The launcher forwards SIGTERM and SIGUSR1, and ranks die with it. If a rank fails, the launcher
stops the others and raises that rank's error. If a signal such as SIGSEGV kills a rank, the error
shows the stacks that the rank wrote. If no rank makes progress for `stall_seconds`, all ranks write
their stacks, and the run ends with them.

The ranks' side is in cluster/ranks.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from ...console.errors import RunError
from ...console.log import get_logger
from ..cluster.hangs import awaited_ranks
from ..cluster.ranks import CRASH, HANG_HINT, INTERRUPTED, LOCK_FD, STORE_FD, WATCH, read_failures
from .template import RankProcess, Template

POLL = 0.05
"""Polling interval in seconds."""
STACK_SETTLED = 0.2
"""A stack file that has not changed for so many seconds is complete."""

log = get_logger(__name__)


@dataclass
class Launcher:
    """Runs forks of the template as ranks of a process group."""

    template: Template
    words: Sequence[str]
    """Command-line arguments for every rank."""
    processes: int
    threads: int
    logs: Path
    """Folder for the output of ranks other than 0."""
    lock: int | None = None
    """File descriptor of the run's lock, which rank 0 holds too."""
    stall_seconds: float = 0.0
    """End the run after so many seconds without progress; 0: never."""
    rank_name: Callable[[int], str] = "rank {}".format
    """Names a rank in messages."""
    grace_seconds: float = 10.0
    """Time for ranks to exit after a rank has failed."""
    stack_seconds: float = 10.0
    """Time for a rank to write its stack."""
    children: list[RankProcess] = field(default_factory=list, init=False)
    stop_requested: bool = field(default=False, init=False)
    """True once a signal has asked the run to save and stop."""
    _beats: list[int] = field(default_factory=list, init=False)
    """Modification times of the ranks' beat files."""
    _progressed_at: float = field(default=0.0, init=False)
    """When `_beats` last changed."""

    def run(self) -> int:
        """Start and watch the ranks. Return the exit code, or raise the first failure's error."""
        self.logs.mkdir(parents=True, exist_ok=True)
        with (
            tempfile.TemporaryDirectory(prefix="headrace-") as folder,
            contextlib.ExitStack() as stack,
        ):
            watch = Path(folder)
            listener = stack.enter_context(socket.socket())
            listener.bind(("127.0.0.1", 0))
            listener.listen(self.processes + 8)
            stack.enter_context(self._forwarding())
            try:
                for rank in range(self.processes):
                    output = None
                    if rank:
                        output = stack.enter_context(self._log(rank).open("ab")).fileno()
                    self._start(rank, listener, watch, output)
                self.template.watch()
                if self.stop_requested:  # before the last rank was started
                    self._send(signal.SIGTERM)
                return self._watch(watch)
            finally:
                self._end()

    def _log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def _start(self, rank: int, listener: socket.socket, watch: Path, output: int | None) -> None:
        environment = {
            **os.environ,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.processes),
            "LOCAL_WORLD_SIZE": str(self.processes),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(listener.getsockname()[1]),
            "OMP_NUM_THREADS": str(self.threads),
            "PYTHONSAFEPATH": "1",  # a file http.py of the user's folder is not Python's http
            WATCH: str(watch),
        }
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        descriptors = {}
        if rank == 0:
            descriptors[STORE_FD] = listener.fileno()
            if self.lock is not None:
                descriptors[LOCK_FD] = self.lock
        self.children.append(self.template.start(self.words, environment, output, descriptors))

    def _watch(self, watch: Path) -> int:
        failed_at: float | None = None
        failed_codes: dict[int, int] = {}
        while True:
            codes = [child.poll() for child in self.children]
            if not failed_codes:  # later failures follow from these
                failed_codes = {
                    rank: code
                    for rank, code in enumerate(codes)
                    if code not in (None, 0, INTERRUPTED)
                }
                failed_at = time.monotonic() if failed_codes else None
            if all(code is not None for code in codes):
                return self._verdict(codes, failed_codes, watch)
            if failed_at is not None and time.monotonic() - failed_at > self.grace_seconds:
                self._end()
            if self.stall_seconds and failed_at is None:
                self._check_progress(watch)
            time.sleep(POLL)

    def _verdict(
        self, codes: Sequence[int | None], failed_codes: dict[int, int], watch: Path
    ) -> int:
        """Return the exit code, or raise the error of the rank that failed first."""
        crashes = self._log_crashes(watch)
        if not failed_codes:
            return INTERRUPTED if INTERRUPTED in codes else 0
        failures = read_failures(watch)
        if self.stop_requested and not failures and not crashes:
            return INTERRUPTED  # ranks were killed before they handled signals: nothing was lost
        reported = {failure.rank for failure in failures}
        killed = [rank for rank, code in failed_codes.items() if code < 0 and rank not in reported]
        if killed or not failures:
            rank = killed[0] if killed else next(iter(failed_codes))
            advice = f"its last words are {f'in {self._log(rank)}' if rank else 'above'}"
            if failed_codes[rank] == -signal.SIGKILL:
                advice = (
                    "if the machine ran out of memory (`--dry-run` prints what each rank needs), "
                    "use a smaller micro_batch_tokens, recompute=block or more ranks"
                )
            raise RunError(
                f"{self.rank_name(rank)} {_describe_exit(failed_codes[rank])} "
                "(no error was reported)",
                where=f"\n{crashes[rank].rstrip()}" if rank in crashes else None,
                hint=f"{advice}; the same command resumes the run",
            )
        first = failures[0]  # the other failures follow from it, even if those ranks exited earlier
        if first.error is not None:
            raise first.error
        raise RunError(
            f"{self.rank_name(first.rank)} stopped: {first.text.strip().splitlines()[-1]}",
            where="\n" + first.text.rstrip(),
            hint="this is a bug in headrace or in a package; the same command resumes the run from "
            "its last checkpoint",
        )

    def _log_crashes(self, watch: Path) -> dict[int, str]:
        """Append the stacks of crashed ranks to their logs, and return them by rank."""
        stacks = {rank: _read_crash(watch, rank) for rank in range(self.processes)}
        crashes = {rank: text for rank, text in stacks.items() if text}
        for rank in crashes.keys() - {0}:  # rank 0 writes to the terminal, where the error goes
            with self._log(rank).open("a") as log_file:
                log_file.write(crashes[rank])
        return crashes

    def _check_progress(self, watch: Path) -> None:
        beats = [watch / f"beat.{rank}" for rank in range(self.processes)]
        if not all(beat.exists() for beat in beats):
            return  # some Python process is still starting
        times, now = [beat.stat().st_mtime_ns for beat in beats], time.monotonic()
        if times != self._beats:  # compared with each other alone: the clock may be set
            self._beats, self._progressed_at = times, now
        if now - self._progressed_at < self.stall_seconds:
            return
        for child in self.children:
            child.send_signal(signal.SIGUSR2)
        stacks = self._collect_stacks(watch)
        sections = [
            f"{self.rank_name(rank)}, {beats[rank].read_text()}:\n{stack or '  (no answer)'}"
            for rank, stack in stacks.items()
        ]
        silent = [self.rank_name(rank) for rank, stack in stacks.items() if not stack]
        # Python handles a signal wherever it waits: a silent rank is stopped, or stuck in a driver.
        who = f"; {' and '.join(silent)} did not write a stack" if silent else ""
        if awaited := [self.rank_name(rank) for rank in awaited_ranks(stacks)]:
            verb = "is" if len(awaited) == 1 else "are"
            who += f"; {' and '.join(awaited)} {verb} in no collective, and the others wait"
        raise RunError(
            f"no rank has made progress for {self.stall_seconds:.0f} seconds{who}",
            where="\n" + "\n".join(sections),
            hint=HANG_HINT,
        )

    def _collect_stacks(self, watch: Path) -> dict[int, str]:
        """Return stacks by rank, empty for ranks that do not answer."""
        deadline = time.monotonic() + self.stack_seconds
        before: dict[int, str] = {}
        while True:
            time.sleep(STACK_SETTLED)
            stacks = {rank: _head(watch / f"stack.{rank}", 25) for rank in range(self.processes)}
            if (all(stacks.values()) and stacks == before) or time.monotonic() > deadline:
                return stacks
            before = stacks

    @contextlib.contextmanager
    def _forwarding(self) -> Iterator[None]:
        """Forward signals that ask the run to save and stop; a second Ctrl-C stops at once."""

        def forward(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT:
                if self.stop_requested:
                    raise KeyboardInterrupt
                log.info("saving; press Ctrl-C again to stop at once")
                number = signal.SIGTERM
            self.stop_requested = True
            self._send(number)

        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        previous_handlers = {number: signal.signal(number, forward) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous_handlers.items():
                signal.signal(number, handler)

    def _send(self, number: int) -> None:
        for child in self.children:
            if child.poll() is None:
                child.send_signal(number)

    def _end(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            running = [child for child in self.children if child.poll() is None]
            for child in running:
                child.send_signal(number)
            deadline = time.monotonic() + self.grace_seconds / 2
            while time.monotonic() < deadline and any(c.poll() is None for c in running):
                time.sleep(POLL)


def _describe_exit(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _read_crash(watch: Path, rank: int) -> str:
    """Return the stacks that faulthandler wrote when a signal killed the rank; else nothing."""
    path = watch / f"{CRASH}.{rank}"
    text = path.read_text(errors="replace") if path.exists() else ""
    return text.partition("\nExtension modules:")[0]  # hundreds of names


def _head(path: Path, lines: int) -> str:
    if not path.exists():
        return ""
    return "\n".join("  " + line for line in path.read_text().splitlines()[:lines])
