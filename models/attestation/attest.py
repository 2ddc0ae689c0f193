"""Verdicts on a plan's subjects, by workers in parallel: they spend most time in compilation.

    attestation = Attestation(plan, "cuda:0")     starts the workers, and returns
    verdicts = attestation.verdicts()             waits for them

A crash or a timeout is the verdict on a worker's subject; a new worker takes its place.
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
from .plan import AttestationPlan, Subject
from .trials import Verdict
from .worker import encode_header

MAX_WORKERS = 4
"""A worker's context takes about half a gigabyte on the GPU."""
COMMAND = [sys.executable, "-m", f"{__package__}.worker"]
TIMEOUT = 600.0
"""Seconds for a subject, compilation included."""
MAX_STDERR = 300
"""Characters from a crashed worker's stderr in the verdict."""


class Attestation:
    """Workers that examine a plan's subjects."""

    def __init__(
        self,
        plan: AttestationPlan,
        device: str,
        *,
        num_workers: int | None = None,
        environment: dict[str, str] | None = None,
        timeout: float = TIMEOUT,
        report: Callable[[Verdict, int, int], None] | None = None,
    ) -> None:
        """`report` gets each verdict, the number of verdicts so far, and their total."""
        self.subjects = plan.subjects()
        self._verdicts: list[Verdict | None] = [None] * len(self.subjects)
        self._numbers: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in range(len(self.subjects)):
            self._numbers.put(number)
        self._report, self._lock = report, threading.Lock()
        num_workers = min(num_workers or min(cores(), MAX_WORKERS), len(self.subjects))
        header = encode_header(plan, device)
        self._workers = [
            _Worker(header, {**os.environ, **(environment or {})}, timeout)
            for _ in range(num_workers)
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

    def drop(self) -> None:
        """Drop waiting subjects: they get no verdict."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._numbers.get_nowait()

    def close(self) -> None:
        """End the workers and drop waiting subjects."""
        self.drop()
        for worker, thread in zip(self._workers, self._threads, strict=True):
            while thread.is_alive():  # it may be about to start its process
                worker.kill()
                thread.join(0.05)

    def _serve(self, worker: _Worker) -> None:
        """Send subjects to a worker until the queue is empty."""
        while True:
            try:
                number = self._numbers.get_nowait()
            except queue.Empty:
                worker.stop()
                return
            verdict = worker.examine(number, self.subjects[number])
            with self._lock:
                self._verdicts[number] = verdict
                num_verdicts = sum(verdict is not None for verdict in self._verdicts)
                if self._report is not None:
                    self._report(verdict, num_verdicts, len(self._verdicts))


class _Worker:
    """Client of a worker process, which it starts again after a crash."""

    def __init__(self, header: str, environment: dict[str, str], timeout: float) -> None:
        self.header, self.timeout = header, timeout
        paths = [path for path in sys.path if path]
        self.environment = {**environment, "PYTHONPATH": os.pathsep.join(paths)}
        self.process: subprocess.Popen[str] | None = None
        self.stderr: IO[str] | None = None

    def examine(self, number: int, subject: Subject) -> Verdict:
        """Return the worker's verdict, or a verdict that says how the worker ended."""
        case, dtype, _ = subject
        failure = Verdict(case.kernel, case.name, dtype, None)
        process = self.process or self._start()
        assert process.stdin is not None and process.stdout is not None
        expired = threading.Event()

        def expire() -> None:
            expired.set()
            process.kill()

        timer = threading.Timer(self.timeout, expire)
        timer.start()
        try:
            process.stdin.write(f"{number}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):  # the process has ended
            line = ""
        finally:
            timer.cancel()
        if line:
            answer = json.loads(line)
            if not answer["usable"]:
                self.stop()
            return Verdict(**answer["verdict"])
        code = process.wait()
        last_line = self._read_last_line()
        self.stop()
        if expired.is_set():
            return replace(failure, problem=f"it did not end within {self.timeout:g} seconds")
        return replace(failure, problem=f"its process ended with {_name_exit(code)}{last_line}")

    def kill(self) -> None:
        """End the process from another thread: `examine` returns."""
        if (process := self.process) is not None:
            process.kill()

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            for stream in (self.process.stdin, self.process.stdout, self.stderr):
                if stream is not None:
                    with contextlib.suppress(OSError):  # a pipe whose reader has ended
                        stream.close()
        self.process = self.stderr = None

    def _start(self) -> subprocess.Popen[str]:
        self.stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed by `stop`
        self.process = process = subprocess.Popen(
            COMMAND,
            env=self.environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
        )
        assert process.stdin is not None
        process.stdin.write(self.header + "\n")
        return process

    def _read_last_line(self) -> str:
        assert self.stderr is not None
        self.stderr.seek(0)
        lines = [line for line in self.stderr.read().splitlines() if line.strip()]
        return f": {lines[-1].strip()[:MAX_STDERR]}" if lines else ""


def _name_exit(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
