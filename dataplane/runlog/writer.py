"""JSON lines of a run: appended by each step, truncated when a run resumes from a checkpoint.

    {"step": 120, "loss": 2.31, "check": "1f0e99a2"}

The check is the CRC-32 of the line before it, so a damaged line is found. Readers never see it;
lines that another program wrote have none.

`sync` makes the lines durable. A power cut may leave anything after the last line that was synced,
also zeros: such lines are removed by the next writer.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ...console.errors import FILE_FAULTS, IntegrityError, StorageError, file_fault
from ..storage.atomic import replacing, sync
from ..storage.faults import storage_error

CHECK = re.compile(rb', "check": "(.{8})"}\n$', re.DOTALL)
TAIL = 1 << 13
"""Bytes that are read at once from the end of a file."""
AFTER = ".after-"
"""Part of the name of a file with lines that were cut; the first step of them follows."""
BLOCK = 1 << 20
"""Bytes that are copied and compared at once."""


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
        line = to_line(entry)
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
    if not path.exists():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        end = _line_end(file, size)
        while end:
            start = _line_end(file, end - 1)
            file.seek(start)
            if entry_of(file.read(end - start)) is not None:
                break
            end = start
    if end < size:
        os.truncate(path, end)


def _line_end(file: BinaryIO, place: int) -> int:
    """Return the end of the last complete line among the bytes before `place`."""
    while place:
        begin = max(0, place - TAIL)
        file.seek(begin)
        found = file.read(place - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        place = begin
    return 0


def to_line(entry: Mapping[str, Any]) -> bytes:
    """Return the line of an entry, with its check."""
    text = json.dumps(entry).removesuffix("}").encode()
    return text + f', "check": "{zlib.crc32(text):08x}"}}\n'.encode()


def entry_of(line: bytes) -> dict[str, Any] | None:
    """Return the entry of a complete line; None if the line is incomplete, not JSON or damaged."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(entry, dict) or not is_sound(line):
        return None
    entry.pop("check", None)
    return entry


def is_sound(line: bytes) -> bool:
    """Return whether a complete line has no check, or one that fits."""
    check = CHECK.search(line)
    return check is None or check[1] == b"%08x" % zlib.crc32(line[: check.start()])


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file. Only the last line can be incomplete."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            entry = entry_of(line)
            if entry is not None:
                yield entry
            elif line.endswith(b"\n"):
                hint = "restore the file from a copy, or delete the line"
                raise IntegrityError(f"line {number} of {path} is damaged", hint=hint)


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
    return next((entry for line in reversed(whole) if (entry := entry_of(line))), None)


def cut(path: Path, step: int) -> Path | None:
    """Move the lines from `step` on to a file beside this one; return its path.

    Steps after the checkpoint are repeated, so they leave the run's history. They are kept as
    evidence, with the lines that a power cut has damaged.
    """
    if not path.exists():
        return None
    with path.open("rb") as file:
        end = _end_before(file, step)
        if end == file.seek(0, os.SEEK_END):
            return None
        place, number = path.with_suffix(f"{AFTER}{step}{path.suffix}"), 1
        while place.exists() and not _ends_with(file, end, place):  # else a kill came in between
            number += 1
            place = path.with_suffix(f"{AFTER}{step}-{number}{path.suffix}")
        try:
            with replacing(place) as tail:
                file.seek(end)
                shutil.copyfileobj(file, tail, BLOCK)
            # A reader may have mapped the file: it is replaced, not truncated.
            with replacing(path) as kept:
                file.seek(0)
                for first in range(0, end, BLOCK):
                    kept.write(file.read(min(BLOCK, end - first)))
        except OSError as error:
            raise storage_error("write", str(path), error) from None
    return place


def tails(path: Path) -> list[Path]:
    """Return the files that `cut` has made beside this one, oldest first."""
    files = path.parent.glob(f"{path.stem}{AFTER}*{path.suffix}")
    return sorted(files, key=lambda file: file.stat().st_mtime_ns)


def _end_before(file: BinaryIO, step: int) -> int:
    """Return the end of the last whole line before that of a step. Damaged lines between whole ones
    stay: no power cut has left them."""
    end = place = 0
    for line in file:
        place += len(line)
        entry = entry_of(line)
        if entry is not None:
            if entry["step"] >= step:
                break
            end = place
    return end


def _ends_with(file: BinaryIO, start: int, tail: Path) -> bool:
    """Return whether the bytes from `start` on are those of another file."""
    file.seek(start)
    with tail.open("rb") as other:
        while (block := file.read(BLOCK)) == other.read(BLOCK):
            if not block:
                return True
    return False
