"""The ledger: the rows of each step, and a rolling hash of their tokens.

    {"step": 120, "first_row": 960, "rows": 8, "hash": "5d0c…"}

The hash is blake2b over the previous step's hash and the digests of the step's rows in global
order; the first step of a plan continues from the plan's own hash. No layout changes it:
two runs with equal hashes have seen the same tokens in the same order, by the same plan.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..storage import storage
from .reader import StepLines

NAME = "ledger.jsonl"
FIELDS = ("step", "first_row", "rows", "hash")
DIGEST_BYTES = 16


def roll(previous: str, digests: bytes) -> str:
    """Return the hash after a step, from the digests of its rows side by side. `previous` is the
    plan's hash at its first step."""
    assert len(digests) % DIGEST_BYTES == 0
    data = bytes.fromhex(previous) + digests
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


@dataclass(frozen=True)
class LedgerEntry:
    """A completed step."""

    step: int
    first_row: int
    rows: int
    hash: str

    @property
    def last_row(self) -> int:
        return self.first_row + self.rows


def last(file: str | Path) -> LedgerEntry | None:
    """Return the newest entry of a ledger."""
    with StepLines(file, FIELDS) as lines:
        return _entry(lines.last())


def find(file: str | Path, step: int) -> tuple[LedgerEntry | None, LedgerEntry | None]:
    """Return the entry before a step, and that of the step."""
    with StepLines(file, FIELDS) as lines:
        before, line = lines.find(step)
    return _entry(before), _entry(line)


def gap(file: str | Path, end: LedgerEntry) -> str | None:
    """Return why the ledger does not lead to the entry `end`; None if it does.

    Its lines must follow each other, step by step and row by row, up to `end`. Later lines do not
    count.
    """
    if not Path(file).exists():
        return "is missing"
    entry: LedgerEntry | None = None
    with StepLines(file, FIELDS) as lines:
        for line in lines:
            before, entry = entry, _entry(line)
            assert entry is not None
            if before and (entry.step, entry.first_row) != (before.step + 1, before.last_row):
                return f"has no line between those of step {before.step} and step {entry.step}"
            if entry.step == end.step:
                same = entry == end
                return None if same else f"has other rows or another hash at step {end.step}"
    return f"ends at step {entry.step}" if entry else "has no steps"


def begin(file: str | Path, entry: LedgerEntry) -> None:
    """Write a ledger that begins with `entry`, the last step of a checkpoint."""
    storage.write(str(file), json.dumps(asdict(entry)).encode() + b"\n")


def _entry(line: dict[str, Any] | None) -> LedgerEntry | None:
    return None if line is None else LedgerEntry(*(line[field] for field in FIELDS))
