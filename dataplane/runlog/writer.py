"""Files of JSON lines that a run appends to, and cuts when it goes back to a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...console.errors import StorageError
from ..storage import storage


class LineWriter:
    """Appends objects; each is on disk as far as the operating system is concerned."""

    def __init__(self, path: Path) -> None:
        self.path = path
        _mend(path)
        self.file = path.open("ab", buffering=0)

    def write(self, entry: dict[str, Any]) -> None:
        line = json.dumps(entry).encode() + b"\n"
        try:
            written = self.file.write(line)
        except OSError as error:
            raise self._failed(error.strerror) from None
        if written != len(line):  # what fits is written, and nothing is said
            raise self._failed("the disk is full")

    def close(self) -> None:
        self.file.close()

    def _failed(self, why: str | None) -> StorageError:
        return StorageError(
            f"cannot write to {self.path}: {why}",
            hint="free some space and run the same command again",
        )


def _mend(path: Path) -> None:
    """Take off a line that a kill or a full disk has torn: the next one would go on in it."""
    if path.exists():
        data = path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            os.truncate(path, whole)


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The whole lines of a file. A line torn by a kill can only be the last."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def cut(path: Path, step: int) -> Path | None:
    """Take the entries from `step` on out of the file; returns where they are kept.

    What a run did after its checkpoint and will do again is no longer its history, and is still
    evidence: it stays beside the file.
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
    taken = "".join(tail).encode()
    place, number = path.with_suffix(f".after-{step}{path.suffix}"), 1
    while place.exists() and place.read_bytes() != taken:  # else a kill came in between
        number += 1
        place = path.with_suffix(f".after-{step}-{number}{path.suffix}")
    storage.write(str(place), taken)
    storage.write(str(path), "".join(kept).encode())
    return place
