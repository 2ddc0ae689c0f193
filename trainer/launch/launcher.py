"""Start the ranks of a run on this machine and watch them.

    launcher ──┬─ rank 0 ─┐
               ├─ rank 1 ─┤  one process group
               └─ …      ─┘

The launcher forwards SIGTERM and SIGUSR1, and its own death kills the ranks. If a rank
fails, the launcher stops the others and raises that rank's error. If no rank makes progress for
`stall_seconds`, each rank writes its stack, and the run ends with these stacks.

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
from ..cluster.ranks import HANG_HINT, INTERRUPTED, LOCK_FD, STORE_FD, WATCH, failures_in
from .template import RankProcess, Template

POLL = 0.05
"""Seconds between two looks at the ranks."""
STACK_SETTLED = 0.2
"""Seconds without change after which a stack is complete."""

log = get_logger(__name__)


@dataclass
class Launcher:
    """Run forks of the template as the ranks of a process group."""

    template: Template
    words: Sequence[str]
    """Arguments of each rank."""
    processes: int
    threads: int
    logs: Path
    """Folder for the output of all ranks but rank 0."""
    lock: int | None = None
    """Descriptor of the run's lock, which rank 0 holds too."""
    stall_seconds: float = 0.0
    """End the run if no rank makes progress for this time; 0: never."""
    name: Callable[[int], str] = "rank {}".format
    """Return the name of a rank in messages."""
    grace_seconds: float = 10.0
    """Time for the other ranks to exit after one has failed."""
    stack_seconds: float = 10.0
    """Time for a rank to write its stack."""
    children: list[RankProcess] = field(default_factory=list, init=False)
    asked: bool = field(default=False, init=False)
    """True once a signal asked the run to save and stop."""
    _beats: list[int] = field(default_factory=list, init=False)
    """Times of the ranks' last beats."""
    _moved: float = field(default=0.0, init=False)
    """When one of them was seen to change."""

    def run(self) -> int:
        """Start and watch the ranks. Return the exit code, or raise the first rank's error."""
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
                if self.asked:  # before the last rank was started
                    self._send(signal.SIGTERM)
                return self._watch(watch)
            finally:
                self._end()

    def _log(self, rank: int) -> Path:
        return self.logs / f"rank-{rank}.log"

    def _last_words(self, rank: int) -> str:
        """Return where a rank's own output is: rank 0 writes to the terminal."""
        return f"in {self._log(rank)}" if rank else "above"

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
        bad: dict[int, int] = {}
        while True:
            codes = [child.poll() for child in self.children]
            if not bad:  # later failures follow from these
                bad = {r: c for r, c in enumerate(codes) if c not in (None, 0, INTERRUPTED)}
                failed_at = time.monotonic() if bad else None
            if all(code is not None for code in codes):
                return self._verdict(codes, bad, watch)
            if failed_at is not None and time.monotonic() - failed_at > self.grace_seconds:
                self._end()
            if self.stall_seconds and failed_at is None:
                self._check_progress(watch)
            time.sleep(POLL)

    def _verdict(self, codes: Sequence[int | None], bad: dict[int, int], watch: Path) -> int:
        """Return the exit code, or raise the error of the rank that failed first."""
        if not bad:
            return INTERRUPTED if INTERRUPTED in codes else 0
        failures = failures_in(watch)
        if self.asked and not failures:
            return (
                INTERRUPTED  # some ranks were killed before they handled signals: nothing was lost
            )
        reported = {failure.rank for failure in failures}
        killed = [rank for rank, code in bad.items() if code < 0 and rank not in reported]
        if killed or not failures:
            rank = killed[0] if killed else next(iter(bad))
            advice = f"its last words are {self._last_words(rank)}"
            if bad[rank] == -signal.SIGKILL:
                advice = (
                    "if the machine ran out of memory (`--dry-run` prints what each rank needs), "
                    "use a smaller micro_batch_tokens, recompute=block or more ranks"
                )
            raise RunError(
                f"{self.name(rank)} {_ending(bad[rank])} (no error was reported)",
                hint=f"{advice}; the same command resumes the run",
            )
        first = failures[0]  # the other failures follow from it, even if those ranks exited earlier
        if first.error is not None:
            raise first.error
        raise RunError(
            f"{self.name(first.rank)} stopped: {first.text.strip().splitlines()[-1]}",
            where="\n" + first.text.rstrip(),
            hint="this is a bug in headrace or in a package; the same command resumes the run from "
            "its last checkpoint",
        )

    def _check_progress(self, watch: Path) -> None:
        beats = [watch / f"beat.{rank}" for rank in range(self.processes)]
        if not all(beat.exists() for beat in beats):
            return  # some Python process is still starting
        times, now = [beat.stat().st_mtime_ns for beat in beats], time.monotonic()
        if times != self._beats:  # compared with each other alone: the clock may be set
            self._beats, self._moved = times, now
        if now - self._moved < self.stall_seconds:
            return
        for child in self.children:
            child.send_signal(signal.SIGUSR2)
        ranks = self._collect_stacks(watch)
        stacks = [
            f"{self.name(rank)}, {beats[rank].read_text()}:\n{stack or '  (no answer)'}"
            for rank, stack in ranks.items()
        ]
        silent = [self.name(rank) for rank, stack in ranks.items() if not stack]
        # Python handles a signal wherever it waits: a silent rank is stopped, or stuck in a driver.
        who = f"; {' and '.join(silent)} did not write a stack" if silent else ""
        if awaited := [self.name(rank) for rank in awaited_ranks(ranks)]:
            verb = "is" if len(awaited) == 1 else "are"
            who += f"; {' and '.join(awaited)} {verb} in no collective, and the others wait"
        raise RunError(
            f"no rank has made progress for {self.stall_seconds:.0f} seconds{who}",
            where="\n" + "\n".join(stacks),
            hint=HANG_HINT,
        )

    def _collect_stacks(self, watch: Path) -> dict[int, str]:
        """Return the stack of each rank; empty for a rank that does not answer."""
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
        """Forward signals that ask the run to save and stop. A second Ctrl-C stops at once."""

        def forward(number: int, frame: FrameType | None) -> None:
            if number == signal.SIGINT:
                if self.asked:
                    raise KeyboardInterrupt
                log.info("saving; press Ctrl-C again to stop at once")
                number = signal.SIGTERM
            self.asked = True
            self._send(number)

        numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
        before = {number: signal.signal(number, forward) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _send(self, number: int) -> None:
        for child in self.children:
            if child.poll() is None:
                child.send_signal(number)

    def _end(self) -> None:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            running = [child for child in self.children if child.poll() is None]
            for child in running:
                child.send_signal(sent)
            deadline = time.monotonic() + self.grace_seconds / 2
            while time.monotonic() < deadline and any(c.poll() is None for c in running):
                time.sleep(POLL)


def _ending(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"exited with code {code}"


def _head(path: Path, lines: int) -> str:
    if not path.exists():
        return ""
    return "\n".join("  " + line for line in path.read_text().splitlines()[:lines])
