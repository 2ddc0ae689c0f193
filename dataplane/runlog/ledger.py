"""The ledger: which rows each step took, and a hash that rolls over their tokens.

    {"step": 120, "first_row": 960, "rows": 8, "hash": "5d0c…"}

The hash is blake2b over the hash before and the digests of the step's rows in global order; before
the first step of a plan stands the plan's own hash. No layout changes it: two runs with one hash
have seen the same tokens in the same order, by the same plan.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .reader import StepLines

NAME = "ledger.jsonl"
FIELDS = ("step", "first_row", "rows", "hash")
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
    with StepLines(file, FIELDS) as lines:
        return _entry(lines.last())


def find(file: str | Path, step: int) -> tuple[Entry | None, Entry | None]:
    """The entry of a step, and the one before it."""
    with StepLines(file, FIELDS) as lines:
        before, found = lines.find(step)
    return _entry(before), _entry(found)


def _entry(line: dict[str, Any] | None) -> Entry | None:
    return None if line is None else Entry(*(line[field] for field in FIELDS))
