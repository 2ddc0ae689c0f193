"""Verdicts of an attestation, from workers side by side: mostly they compile.

    attestation = Attestation(plan, "cuda:0")     starts the workers, and returns
    verdicts = attestation.verdicts()             waits for them

A worker that crashes or hangs gives its subject a verdict, and another one takes its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import IO

from ...console.machine import cores
from .plan import Plan, Subject
from .trials import Verdict
from .worker import arguments

MAX_WORKERS = 4
"""Each has a context on the GPU, of about half a gigabyte."""
COMMAND = [sys.executable, "-m", f"{__package__}.worker"]
PATIENCE = 600.0
"""Seconds for one case, with the compilation of its programs."""
WORDS = 300
"""Characters of a crashed worker's last words in its verdict."""


class Attestation:
    """The workers of a plan, and their verdicts."""

    def __init__(
        self,
        plan: Plan,
        device: str,
        *,
        num_workers: int | None = None,
        environment: dict[str, str] | None = None,
        patience: float = PATIENCE,
        report: Callable[[Verdict, int, int], None] | None = None,
    ) -> None:
        """`report` is told each verdict, how many are there, and how many will be."""
        self.subjects = plan.subjects()
        self._verdicts: list[Verdict | None] = [None] * len(self.subjects)
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(self.subjects)):
            self._numbers.put(number)
        self._report, self._lock = report, threading.Lock()
        count = min(num_workers or cores(), MAX_WORKERS, len(self.subjects))
        header = json.dumps(arguments(plan, device))
        self._workers = [
            _Worker(header, {**os.environ, **(environment or {})}, patience) for _ in range(count)
        ]
        self._threads = [
            threading.Thread(target=self._serve, args=[worker], daemon=True)
            for worker in self._workers
        ]
        for thread in self._threads:
            thread.start()

    def verdicts(self) -> list[Verdict]:
        """Wait for all verdicts, and return them in the plan's order."""
        for thread in self._threads:
            thread.join()
        return [verdict for verdict in self._verdicts if verdict is not None]

    def close(self) -> None:
        """End the workers, and give out no more subjects."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._numbers.get_nowait()
        for worker, thread in zip(self._workers, self._threads, strict=True):
            while thread.is_alive():  # it may be about to start its process
                worker.kill()
                thread.join(0.05)

    def _serve(self, worker: _Worker) -> None:
        """Give subjects to a worker until none is left."""
        while True:
            try:
                number = self._numbers.get_nowait()
            except queue.Empty:
                worker.end()
                return
            verdict = worker.examine(number, self.subjects[number])
            with self._lock:
                self._verdicts[number] = verdict
                count = sum(verdict is not None for verdict in self._verdicts)
                if self._report is not None:
                    self._report(verdict, count, len(self._verdicts))


class _Worker:
    """A worker, as the process sees it that gives it subjects."""

    def __init__(self, header: str, environment: dict[str, str], patience: float) -> None:
        self.header, self.patience = header, patience
        paths = [path for path in sys.path if path]
        self.environment = {**environment, "PYTHONPATH": os.pathsep.join(paths)}
        self.process: subprocess.Popen[str] | None = None
        self.words: IO[str] | None = None
        """File of what the process writes to stderr."""

    def examine(self, number: int, subject: Subject) -> Verdict:
        """Return the worker's verdict, or one that says how the worker ended."""
        case, dtype, _ = subject
        failed = Verdict(case.kernel, case.name, dtype, None)
        process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        expired = threading.Event()

        def end() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(self.patience, end)
        timer.start()
        try:
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):  # it has ended
            line = ""
        finally:
            timer.cancel()
        if line:
            answer = json.loads(line)
            if not answer["usable"]:
                self.end()
            return Verdict(**answer["verdict"])
        code = process.wait()
        words = self._last_words()
        self.end()
        if expired.is_set():
            return replace(failed, problem=f"it did not end within {self.patience:g} seconds")
        return replace(failed, problem=f"its process ended with {_name_end(code)}{words}")

    def kill(self) -> None:
        """End the process from another thread; `examine` sees it."""
        if (process := self.process) is not None:
            process.kill()

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout, self.words):
                if stream is not None:
                    with contextlib.suppress(OSError):  # a pipe whose reader has ended
                        stream.close()
        self.process = self.words = None

    def _start(self) -> subprocess.Popen[str]:
        self.words = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by `end`
        self.process = process = subprocess.Popen(
            COMMAND,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.words,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(self.header + "\n")
        return process

    def _last_words(self) -> str:
        assert self.words is not None
        self.words.seek(0)
        lines = [line for line in self.words.read().splitlines() if line.strip()]
        return f": {lines[-1].strip()[:WORDS]}" if lines else ""


def _name_end(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
