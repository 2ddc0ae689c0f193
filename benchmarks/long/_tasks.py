"""Tasks of a script: processes with a time limit, whose lines go into a file as they come.

Each task runs in a process of its own, so that a crash does not affect the others. A task may
measure several items: it prints a line for each, `ITEM: …`. If its process dies or hangs, the item
without a line gets one that says so, and a new process continues behind it.
"""

from __future__ import annotations

import os
import platform
import selectors
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatch
from itertools import groupby
from pathlib import Path
from threading import Lock

WRONG = "WRONG"
"""Word of each line that reports a wrong value."""
FAILURES = ("failed", "stopped")
"""First words of results that report a failure."""
NEVER = float("inf")


@dataclass(frozen=True)
class Task:
    """A process to run."""

    name: str
    command: tuple[str, ...]
    """Python script and its arguments; the items without a result follow them."""
    limit: float
    """Seconds for the process; for each item, if there are items."""
    items: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    concurrent: bool = False
    """True if it may run while other tasks run."""

    @property
    def lines(self) -> tuple[str, ...]:
        """Names with which the lines of the results begin, one for each result."""
        return self.items or (self.name,)


class Report:
    """Print lines at once, and append each to a file in one write.

    With `resumed`, the results in the file count as results: the rest of an
    interrupted line is cut off. Results that match a pattern of `again` do not count.
    """

    def __init__(
        self, file: Path | None, *, resumed: bool = False, again: Sequence[str] = ()
    ) -> None:
        self.file = file
        self.again = again
        self.lines: list[str] = []
        self.lock = Lock()
        if resumed and file is not None and file.exists():
            text = file.read_bytes()
            whole = text[: text.rfind(b"\n") + 1]
            if len(whole) < len(text):
                os.truncate(file, len(whole))
            self.lines = whole.decode().splitlines()
        self.earlier = len(self.lines)
        """Number of lines that were in the file."""

    def __call__(self, line: str) -> None:
        with self.lock:
            self.lines.append(line)
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
            if self.file is not None:
                with self.file.open("ab", buffering=0) as file:
                    file.write(f"{line}\n".encode())

    def result(self, name: str) -> str | None:
        """Return the last result of a task or an item, or None if there is none."""
        repeated = any(fnmatch(name, pattern) for pattern in self.again)
        for line in reversed(self.lines[self.earlier * repeated :]):
            if line.startswith(f"{name}: "):
                return line.removeprefix(f"{name}: ")
        return None


def circumstances(dry: bool) -> list[str]:
    """Return the first lines of a report: date, device, versions, command."""
    import torch
    import triton

    where = "CPU, Triton's interpreter" if dry else torch.cuda.get_device_name()
    return [
        f"date:     {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"device:   {where}",
        f"versions: python {platform.python_version()}, torch {torch.__version__},"
        f" triton {triton.__version__}",
        f"command:  {shlex.join(['python', *sys.argv])}",
        "",
    ]


def run_all(tasks: Sequence[Task], report: Report, until: float = NEVER) -> None:
    """Run the tasks that have no result yet, until that time of the monotonic clock."""
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))
    for concurrent, group in groupby(tasks, key=lambda task: task.concurrent):
        with ThreadPoolExecutor(workers if concurrent else 1) as pool:
            list(pool.map(lambda task: run(task, report, until), group))


def unfinished(tasks: Sequence[Task], report: Report) -> list[str]:
    """Return the names of the results that are missing."""
    return [name for task in tasks for name in task.lines if report.result(name) is None]


def failed(tasks: Sequence[Task], report: Report) -> list[str]:
    """Return the names of the results that report a failure."""
    results = {name: report.result(name) or "" for task in tasks for name in task.lines}
    return [name for name, text in results.items() if text.startswith(FAILURES)]


def run(task: Task, report: Report, until: float = NEVER) -> None:
    """Run a task until each of its items has a result, or the time is up."""
    while pending := unfinished([task], report):
        if time.monotonic() >= until:
            return
        began = time.monotonic()
        command = [sys.executable, *task.command, *(pending if task.items else ())]
        ended = _follow(command, task, report, until)
        if ended == OUT_OF_TIME:
            return
        taken = f"{time.monotonic() - began:.1f} s"
        if not task.items:
            report(f"{task.name}: {ended or 'passed'}, {taken}")
            continue
        pending = unfinished([task], report)
        if ended and pending:
            report(f"{pending[0]}: {ended}, {taken}")
        elif not ended:
            for name in pending:
                report(f"{name}: failed: its process ended without a line for it")


OUT_OF_TIME = "out of time"


def _follow(command: Sequence[str], task: Task, report: Report, until: float) -> str:
    """Run a process and report its lines. Return how it failed; empty if it succeeded."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", **task.environment}
    with subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # a traceback belongs to the report
        start_new_session=True,  # tools start processes of their own: all of them are stopped
    ) as process:
        RUNNING.add(process)
        try:
            for line in _lines(process, task, until):
                report(line)
        except TimeoutError as stopped:
            _kill(process)
            return str(stopped)
        except BaseException:
            _kill(process)
            raise
        finally:
            RUNNING.discard(process)
    code = process.returncode
    if code < 0:
        return f"failed: killed by {signal.Signals(-code).name}"
    return f"failed: exit code {code}" if code else ""


def _lines(process: subprocess.Popen[bytes], task: Task, until: float) -> Iterator[str]:
    """Yield the lines of a process until it ends. Raise TimeoutError if it takes too long."""
    assert process.stdout is not None
    end = time.monotonic() + task.limit
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        running = True
        while running or process.poll() is None:
            remaining = min(end, until) - time.monotonic()
            if remaining <= 0:
                raise TimeoutError(
                    f"stopped after {task.limit:g} s" if end < until else OUT_OF_TIME
                )
            if not running:  # it has closed its output
                time.sleep(0.01)
            elif selector.select(min(remaining, 1.0)):
                data = os.read(process.stdout.fileno(), 1 << 16)
                running = bool(data)
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    text = line.decode(errors="replace").rstrip()
                    if text.partition(": ")[0] in task.items:
                        end = time.monotonic() + task.limit
                    yield text
            elif process.poll() is not None:  # a process that it left behind holds the pipe
                running = False
    if rest:
        yield rest.decode(errors="replace").rstrip()


RUNNING: set[subprocess.Popen[bytes]] = set()
"""Processes to stop if this one is asked to stop."""


def _kill(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def stop_with_tasks() -> None:
    """From now on, SIGTERM ends this process and its tasks."""

    def stop(number: int, frame: object) -> None:
        for process in list(RUNNING):
            _kill(process)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
