"""Progress on stderr: an updated line on a terminal, one line per minute elsewhere."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import TextIO

from .log import CLEAR_LINE, can_rewrite_lines

QUIET_SECONDS = 60.0
TERMINAL_SECONDS = 0.2


def format_number(number: float) -> str:
    """Format a number: 12345 → '12.3K', with the suffixes that configurations accept."""
    for suffix, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(number) >= size * 0.9995:  # three digits round up to this suffix
            scaled = number / size
            return f"{scaled:.0f}{suffix}" if abs(scaled) >= 999.5 else f"{scaled:.3g}{suffix}"
    return f"{number:.3g}" if isinstance(number, float) else str(number)


def format_bytes(number: float) -> str:
    """Format bytes: 1490000000 → '1.49 GB'; G stands for 10^9 bytes.

    Memory is counted so too, as in hardware files, rates and GPU names.
    """
    text = format_number(number).replace("B", "G")
    if text[-1].isalpha():
        return f"{text[:-1]} {text[-1]}B"
    return f"{text} byte{'s' * (text != '1')}"


def format_count(number: float, plural: str) -> str:
    """Format a count with its noun: '1 file', '1.2K files'."""
    return f"{format_number(number)} {plural.removesuffix('s') if number == 1 else plural}"


def exact_count(number: int, plural: str) -> str:
    """Format a count with all its digits and its noun: '1 file', '1,234 files'."""
    return f"{number:,} {plural.removesuffix('s') if number == 1 else plural}"


def format_seconds(seconds: float) -> str:
    """Format the seconds of a step: 1.0193 → '1.019 s', 0.000132 → '0.132 ms'."""
    return f"{seconds:.4g} s" if seconds >= 0.1 else f"{seconds * 1e3:.4g} ms"


def format_duration(seconds: float) -> str:
    """Format seconds: 3725 → '1h02m', 65 → '1m05s'."""
    rounded = round(seconds)
    if rounded >= 3600:
        return f"{rounded // 3600}h{rounded % 3600 // 60:02d}m"
    if rounded >= 60:
        return f"{rounded // 60}m{rounded % 60:02d}s"
    return f"{seconds:.1f}s" if seconds < 10 else f"{rounded}s"


class Progress:
    """Counts towards a total and prints the progress.

    `advance(n)` adds n; `details` are the caller's counters, printed with it.

        with Progress("building", total=size, unit="B") as progress:
            progress.advance(len(block), documents=1)
    """

    def __init__(
        self,
        label: str,
        *,
        total: float | None = None,
        unit: str = "",
        stream: TextIO | None = None,
    ) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done = 0.0
        self.details: dict[str, float | str] = {}
        self.stream = stream or sys.stderr
        self.terminal = can_rewrite_lines(self.stream)
        self.pause = TERMINAL_SECONDS if self.terminal else QUIET_SECONDS
        """Seconds between two lines."""
        self.started = self.shown = time.monotonic()

    def advance(self, amount: float = 1, **counters: float) -> None:
        """Add to the amount done and to the named counters; print when due."""
        self.done += amount
        for name, value in counters.items():
            previous = self.details.get(name, 0)
            self.details[name] = (previous if isinstance(previous, (int, float)) else 0) + value
        if time.monotonic() - self.shown >= self.pause:
            self.show()

    def line(self, *, ended: bool = False) -> str:
        """Return the current progress line."""
        elapsed = max(time.monotonic() - self.started, 1e-9)
        texts = [f"{self.label}: {self._amount(self.done)}"]
        if self.total:
            texts[0] += f" of {self._amount(self.total)} ({self.done / self.total:.0%})"
        texts += [
            format_count(value, name) if isinstance(value, (int, float)) else f"{value} {name}"
            for name, value in self.details.items()
        ]
        texts.append(f"{self._amount(self.done / elapsed)}/s")
        if self.total and 0 < self.done < self.total and not ended:
            texts.append(f"{format_duration(elapsed * (self.total / self.done - 1))} left")
        else:
            texts.append(format_duration(elapsed))
        return ", ".join(texts)

    def _amount(self, number: float) -> str:
        return format_bytes(number) if self.unit == "B" else f"{format_number(number)}{self.unit}"

    def show(self, *, ended: bool = False) -> None:
        """Print the progress line now."""
        self.shown = time.monotonic()
        line = self.line(ended=ended)
        if self.terminal:  # a line that wraps could not be cleared
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(f"{CLEAR_LINE}{line[:width]}")
        else:
            self.stream.write(f"{line}\n")
        self.stream.flush()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None or self.terminal:
            self.show(ended=True)
        if self.terminal:
            self.stream.write("\n")


class Waiting(Progress):
    """Shows how long uncountable work takes: a thread prints the time.

    with Waiting("merging"):
        merge()
    """

    def __init__(self, label: str, *, stream: TextIO | None = None) -> None:
        super().__init__(label, stream=stream)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="progress", daemon=True)

    def line(self, *, ended: bool = False) -> str:
        return f"{self.label}: {format_duration(time.monotonic() - self.started)}"

    def _watch(self) -> None:
        while not self._ended.wait(self.pause):
            self.show()

    def __enter__(self) -> Waiting:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        super().__exit__(*error)
