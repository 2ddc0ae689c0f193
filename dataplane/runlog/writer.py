"""JSON lines of a run: appended step by step, truncated when a run resumes from a checkpoint.

    {"step": 120, "loss": 2.31, "check": "1f0e99a2"}

The check is a CRC-32 over the line up to it, and reveals damage. Readers never see it; lines by
another program have none.

`sync` makes the lines durable. After the last synced line, a power cut may leave anything, even
zeros: the next writer removes such lines.
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
TAIL_BYTES = 1 << 13
"""Bytes per read from the end of a file."""
AFTER = ".after-"
"""Names a file of cut lines, before their first step."""
BLOCK_BYTES = 1 << 20
"""Bytes copied or compared at once."""


class LineWriter:
    """Appends objects as lines, unbuffered."""

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
        line = encode_line(entry)
        try:
            written = self.file.write(line)
        except OSError as error:
            raise self._failed(*file_fault(error)) from None
        if written != len(line):  # a full disk accepts a prefix without an error
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
    """Remove incomplete last lines, left by a kill, a full disk or a power cut."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        end = _line_end(file, size)
        while end:
            start = _line_end(file, end - 1)
            file.seek(start)
            if decode_line(file.read(end - start)) is not None:
                break
            end = start
    if end < size:
        os.truncate(path, end)


def _line_end(file: BinaryIO, end: int) -> int:
    """Return the end of the last complete line before byte `end`."""
    while end:
        start = max(0, end - TAIL_BYTES)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def encode_line(entry: Mapping[str, Any]) -> bytes:
    """Encode an entry as a line with a check."""
    checked = json.dumps(entry).removesuffix("}").encode()
    return checked + f', "check": "{zlib.crc32(checked):08x}"}}\n'.encode()


def decode_line(line: bytes) -> dict[str, Any] | None:
    """Decode a line; None if it is incomplete, no JSON object, or damaged."""
    try:
        entry = json.loads(line) if line.endswith(b"\n") else None
    except ValueError:
        return None
    if not isinstance(entry, dict) or not has_valid_check(line):
        return None
    entry.pop("check", None)
    return entry


def has_valid_check(line: bytes) -> bool:
    """Tell whether a complete line has a matching check, or none."""
    check = CHECK.search(line)
    return check is None or check[1] == b"%08x" % zlib.crc32(line[: check.start()])


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file. Only the last line may be incomplete."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            entry = decode_line(line)
            if entry is not None:
                yield entry
            elif line.endswith(b"\n"):
                hint = "restore the file from a copy, or delete the line"
                raise IntegrityError(f"line {number} of {path} is damaged", hint=hint)


def read_last(path: Path) -> dict[str, Any] | None:
    """Read the last complete line, from the end of the file; None if there is none."""
    if not path.exists():
        return None
    with path.open("rb") as file:
        start, tail = file.seek(0, os.SEEK_END), b""
        while start and tail.count(b"\n") < 3:  # the last line may be incomplete
            end, start = start, max(0, start - TAIL_BYTES)
            file.seek(start)
            tail = file.read(end - start) + tail
    lines = tail.splitlines(keepends=True)[1 if start else 0 :]
    return next((entry for line in reversed(lines) if (entry := decode_line(line))), None)


def cut(path: Path, step: int) -> Path | None:
    """Move the lines from `step` on to a file beside this one; returns its path, or None without
    such lines.

    A resumed run repeats the steps after the checkpoint, so they leave its history. They are kept
    as evidence, with lines that a power cut has damaged.
    """
    if not path.exists():
        return None
    with path.open("rb") as file:
        end = _end_before(file, step)
        if end == file.seek(0, os.SEEK_END):
            return None
        tail_path, number = path.with_suffix(f"{AFTER}{step}{path.suffix}"), 1
        # An equal tail is the work of a call that was killed before it replaced the file.
        while tail_path.exists() and not _ends_with(file, end, tail_path):
            number += 1
            tail_path = path.with_suffix(f"{AFTER}{step}-{number}{path.suffix}")
        try:
            with replacing(tail_path) as tail:
                file.seek(end)
                shutil.copyfileobj(file, tail, BLOCK_BYTES)
            # A reader may have mapped the file: it is replaced, not truncated.
            with replacing(path) as head:
                file.seek(0)
                for start in range(0, end, BLOCK_BYTES):
                    head.write(file.read(min(BLOCK_BYTES, end - start)))
        except OSError as error:
            raise storage_error("write", str(path), error) from None
    return tail_path


def list_tails(path: Path) -> list[Path]:
    """List the files that `cut` wrote beside this one, oldest first."""
    files = path.parent.glob(f"{path.stem}{AFTER}*{path.suffix}")
    return sorted(files, key=lambda file: file.stat().st_mtime_ns)


def _end_before(file: BinaryIO, step: int) -> int:
    """Return the end of the last undamaged line before a step. Damaged lines between undamaged ones
    stay: they come from no power cut."""
    end = offset = 0
    for line in file:
        offset += len(line)
        entry = decode_line(line)
        if entry is not None:
            if entry["step"] >= step:
                break
            end = offset
    return end


def _ends_with(file: BinaryIO, start: int, tail_path: Path) -> bool:
    """Compare the bytes from `start` on with a whole file."""
    file.seek(start)
    with tail_path.open("rb") as tail:
        while (block := file.read(BLOCK_BYTES)) == tail.read(BLOCK_BYTES):
            if not block:
                return True
    return False
