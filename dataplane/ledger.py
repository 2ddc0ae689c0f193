"""The ledger: which rows each step took, and a hash that rolls over their tokens.

    {"step": 120, "first_row": 960, "rows": 8, "hash": "5d0c…"}

The hash is blake2b over the hash before and the digests of the step's rows in global order; before
the first step of a plan stands the plan's own hash. No layout changes it: two runs with one hash
have seen the same tokens in the same order, by the same plan.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..console.errors import IntegrityError, StorageError
from . import storage

NAME = "ledger.jsonl"
DIGEST_BYTES = 16


def roll(previous: str, digests: Iterable[bytes]) -> str:
    """The hash after a step. `previous` is the plan's hash before its first step."""
    state = hashlib.blake2b(bytes.fromhex(previous), digest_size=DIGEST_BYTES)
    for digest in digests:
        assert len(digest) == DIGEST_BYTES
        state.update(digest)
    return state.hexdigest()


@dataclass(frozen=True)
class Entry:
    """A step that was taken."""

    step: int
    first_row: int
    rows: int
    hash: str

    @property
    def last_row(self) -> int:
        return self.first_row + self.rows


def last(file: str | Path) -> Entry | None:
    """The newest entry of a ledger."""
    with _Lines(file) as lines:
        return lines.entry(lines.before(lines.end)) if lines.end else None


def find(file: str | Path, step: int) -> tuple[Entry | None, Entry | None]:
    """The entry of a step, and the one before it: steps are in order, so by bisection."""
    with _Lines(file) as lines:
        low, high = 0, lines.end  # places where a line begins
        while low < high:
            place = lines.before((low + high) // 2 + 1)
            if lines.entry(place).step < step:
                low = lines.after(place)
            else:
                high = place
        before = lines.entry(lines.before(low)) if low else None
        found = lines.entry(low) if low < lines.end else None
    return before, found if found is not None and found.step == step else None


class _Lines:
    """The whole lines of a file; one that a kill has torn can only be the last."""

    def __init__(self, file: str | Path) -> None:
        self.where = str(file)
        self.data: bytes | mmap.mmap
        if storage.is_local(self.where):
            try:
                with storage.local_path(self.where).open("rb") as opened:
                    empty = not os.fstat(opened.fileno()).st_size
                    read = mmap.ACCESS_READ
                    self.data = b"" if empty else mmap.mmap(opened.fileno(), 0, access=read)
            except OSError as error:
                raise StorageError(f"cannot read {file}: {error.strerror}") from None
        else:
            self.data = storage.read(self.where)
        self.end = self.data.rfind(b"\n") + 1

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self.data, mmap.mmap):
            self.data.close()

    def before(self, place: int) -> int:
        """Where the line begins that the byte before `place` belongs to."""
        return self.data.rfind(b"\n", 0, place - 1) + 1

    def after(self, place: int) -> int:
        return self.data.find(b"\n", place) + 1

    def entry(self, place: int) -> Entry:
        line = self.data[place : self.after(place)]
        try:
            data = json.loads(line)
            return Entry(data["step"], data["first_row"], data["rows"], data["hash"])
        except (ValueError, KeyError, TypeError):
            raise IntegrityError(
                f"{self.where} has a line that is no entry: {line[:80]!r}",
                mend="restore it from a copy; without it, audit the run's plan.json",
            ) from None
