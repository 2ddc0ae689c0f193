"""JSON lines of a run: appended by each step, truncated when a run resumes from a checkpoint.

`sync` makes the lines durable. A power cut may leave anything after the last line that was synced,
also zeros: such lines are removed by the next writer.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...console.errors import FILE_FAULTS, StorageError, file_fault
from ..storage import storage
from ..storage.atomic import sync

TAIL = 1 << 13
"""Bytes that `last` reads at once."""


class LineWriter:
    """Appends objects. Each line is handed to the operating system at once (no buffer)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            new = not path.exists()
            _repair(path)
            self.file = path.open("ab", buffering=0)
            if new:
                sync(path.parent)
        except OSError as error:
            raise self._failed(*file_fault(error)) from None

    def write(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        try:
            written = self.file.write(line)
        except OSError as error:
            raise self._failed(*file_fault(error)) from None
        if written != len(line):  # a full disk takes a part without an error
            raise self._failed(*FILE_FAULTS[errno.ENOSPC])

    def sync(self) -> None:
        """Make the lines durable."""
        try:
            os.fsync(self.file.fileno())
        except OSError as error:
            raise self._failed(*file_fault(error)) from None

    def close(self) -> None:
        self.file.close()

    def _failed(self, why: str, hint: str | None) -> StorageError:
        return StorageError(f"cannot write to {self.path}: {why}", hint=hint)


def _repair(path: Path) -> None:
    """Remove incomplete last lines, left by a kill, a full disk or a power cut, before lines are
    appended."""
    if path.exists():
        data = path.read_bytes()
        end = data.rfind(b"\n") + 1
        while end and _entry(data[(start := data.rfind(b"\n", 0, end - 1) + 1) : end]) is None:
            end = start
        if end < len(data):
            os.truncate(path, end)


def _entry(line: bytes) -> dict[str, Any] | None:
    """Return the object of a complete line; None if the line is incomplete or not JSON."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file. Only the last line can be incomplete."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def last(path: Path) -> dict[str, Any] | None:
    """Return the last complete line, read from the end of the file; None if there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        start, tail = file.seek(0, os.SEEK_END), b""
        while start and tail.count(b"\n") < 3:  # the last line may be incomplete
            begin = max(0, start - TAIL)
            file.seek(begin)
            start, tail = begin, file.read(start - begin) + tail
    whole = tail.splitlines(keepends=True)[1 if start else 0 :]
    return next((entry for line in reversed(whole) if (entry := _entry(line))), None)


def cut(path: Path, step: int) -> Path | None:
    """Move the lines from `step` on to a file beside this one; return its path.

    Steps after the checkpoint are repeated, so they leave the run's history. They are kept as
    evidence, with the lines that a power cut has damaged.
    """
    if not path.exists():
        return None
    end = 0
    with path.open("rb") as file:
        for line in file:
            entry = _entry(line)
            if entry is None or entry["step"] >= step:
                break
            end += len(line)
    data = path.read_bytes()
    kept, removed = data[:end], data[end:]
    if not removed:
        return None
    place, number = path.with_suffix(f".after-{step}{path.suffix}"), 1
    while place.exists() and place.read_bytes() != removed:  # an equal file: a kill came in between
        number += 1
        place = path.with_suffix(f".after-{step}-{number}{path.suffix}")
    storage.write(str(place), removed)
    storage.write(str(path), kept)
    return place
