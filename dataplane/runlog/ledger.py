"""The ledger: the rows of each step, and a rolling hash of their tokens.

    {"step": 120, "first_row": 960, "rows": 8, "hash": "5d0c…"}

The hash is blake2b over the previous step's hash and the digests of the step's rows in global
order; the first step of a plan continues from the plan's own hash. No layout changes it:
two runs with equal hashes have seen the same tokens in the same order, by the same plan.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


def _entry(line: dict[str, Any] | None) -> LedgerEntry | None:
    return None if line is None else LedgerEntry(*(line[field] for field in FIELDS))
