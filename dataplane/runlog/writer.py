"""JSON lines of a run: appended by each step, truncated when a run resumes from a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...console.errors import StorageError
from ..storage import storage


class LineWriter:
    """Appends objects. Each line is handed to the operating system at once (no buffer)."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _repair(path)
        self.file = path.open("ab", buffering=0)

    def write(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        try:
            written = self.file.write(line)
        except OSError as error:
            raise self._failed(error.strerror) from None
        if written != len(line):  # a full disk takes a part without an error
            raise self._failed("the disk is full")

    def close(self) -> None:
        self.file.close()

    def _failed(self, why: str | None) -> StorageError:
        return StorageError(
            f"cannot write to {self.path}: {why}",
            hint="free some space and run the same command again",
        )


def _repair(path: Path) -> None:
    """Remove an incomplete last line, left by a kill or a full disk, before lines are appended."""
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the complete lines of a file. Only the last line can be incomplete."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def cut(path: Path, step: int) -> Path | None:
    """Move the entries from `step` on to a file beside this one; return its path.

    Steps after the checkpoint are repeated, so they leave the run's history. They are kept as
    evidence.
    """
    if not path.exists():
        return None
    kept: list[str] = []
    tail: list[str] = []
    with path.open(encoding="utf-8") as file:
        for line in file:
            whole = line.endswith("\n")
            (kept if whole and json.loads(line)["step"] < step else tail).append(line)
    if not tail:
        return None
    removed = "".join(tail).encode()
    place, number = path.with_suffix(f".after-{step}{path.suffix}"), 1
    while place.exists() and place.read_bytes() != removed:  # an equal file: a kill came in between
        number += 1
        place = path.with_suffix(f".after-{step}-{number}{path.suffix}")
    storage.write(str(place), removed)
    storage.write(str(path), "".join(kept).encode())
    return place
