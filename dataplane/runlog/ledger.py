"""The ledger: the rows of every step, and a rolling hash of their tokens.

    {"step": 120, "first_row": 960, "rows": 8, "hash": "5d0c…"}

The hash is blake2b over the previous step's hash and the digests of the step's rows in global
order; a plan's first step continues from the plan's hash. It is the same in every layout: two runs
with equal hashes have seen the same tokens in the same order, by the same plan. Where the shares of
a decision begin (decisions.py), its digest comes before those of the rows; the line has it as
`decision`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ...console.errors import IntegrityError
from ..storage import storage
from .reader import StepLines, has_step
from .writer import encode_line

NAME = "ledger.jsonl"
FIELDS = ("step", "first_row", "rows", "hash")
DECISION = "decision"
OPTIONAL = {"skipped", "why", "back_to", DECISION}
"""Further keys: of a skipped step, and of a step with new shares."""
DIGEST_BYTES = 16
COMMITMENT_BYTES = 32


def roll(previous: str, digests: bytes) -> str:
    """Compute the hash after a step from the concatenated digests of its rows, with that of a
    decision before them. `previous` is the hash before the step: at first, the plan's."""
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
    def end_row(self) -> int:
        return self.first_row + self.rows


def read_last(file: str | Path) -> LedgerEntry | None:
    """Read the newest entry; None if the ledger is empty."""
    with StepLines(file, _is_whole) as lines:
        return _entry(lines.last())


def read_steps(file: str | Path) -> range:
    """Return the steps that the ledger has, from its first line to its last."""
    with StepLines(file, _is_whole) as lines:
        first, last = next(iter(lines), None), lines.last()
    return range(first["step"], last["step"] + 1) if first and last else range(0)


def find_entries(file: str | Path, step: int) -> tuple[LedgerEntry | None, LedgerEntry | None]:
    """Find the entry before a step, and the step's entry."""
    with StepLines(file, _is_whole) as lines:
        before, entry = map(_entry, lines.find(step))
    if before and entry and not _follows(entry, before):
        raise IntegrityError(
            f"{file} {_describe_gap(before, entry)}",
            hint="restore it from a copy; without it, audit the run's plan.json",
        )
    return before, entry if entry and entry.step == step else None


def find_skipped(file: str | Path) -> Iterator[tuple[int, int]]:
    """Yield, for each skipped step, the steps [first, end) that the weights do not hold: the step
    itself, and before it those that the run rolled back."""
    with StepLines(file, _is_whole) as lines:
        for line in lines.with_key("skipped"):
            yield line.get("back_to", line["step"]), line["step"] + 1


def find_decisions(file: str | Path) -> Iterator[tuple[int, str]]:
    """Yield the steps from which new shares hold, and the digests of these decisions."""
    with StepLines(file, _is_whole) as lines:
        for line in lines.with_key(DECISION):
            yield line["step"], line[DECISION]


def commit(file: str | Path, plan_hash: str, step: int) -> str:
    """Hash a plan's hash and the ledger's lines up to a step.

    Unlike the hash in a line, it is checked without the rows. Who publishes it can change neither
    the plan nor a line afterwards.
    """
    state = hashlib.blake2b(bytes.fromhex(plan_hash), digest_size=COMMITMENT_BYTES)
    with StepLines(file, _is_whole) as lines, lines.through(step) as data:
        state.update(data)
    return state.hexdigest()


def find_gap(file: str | Path, end: LedgerEntry | None = None) -> str | None:
    """Explain why the ledger does not lead to `end`, by default its last entry; None if it does.

    Lines must be undamaged and consecutive, in steps and rows, up to `end`. Later lines are not
    checked.
    """
    if not Path(file).exists():
        return "is missing"
    try:
        return _first_fault(file, end)
    except IntegrityError as error:
        return error.message.removeprefix(f"{file} ")


def _first_fault(file: str | Path, end: LedgerEntry | None) -> str | None:
    entry: LedgerEntry | None = None
    with StepLines(file, _is_whole) as lines:
        for line in lines:
            before, entry = entry, _entry(line)
            assert entry is not None
            if before and not _follows(entry, before):
                return _describe_gap(before, entry)
            if end is not None and entry.step == end.step:
                if entry == end:
                    return None
                return f"has other rows or another hash at step {end.step}"
    if end is None:
        return None
    return f"ends at step {entry.step}" if entry else "has no steps"


def begin(file: str | Path, entry: LedgerEntry) -> None:
    """Begin a ledger with `entry`, the last step of a checkpoint."""
    storage.write(str(file), encode_line(asdict(entry)))


def _entry(line: dict[str, Any] | None) -> LedgerEntry | None:
    return None if line is None else LedgerEntry(*(line[field] for field in FIELDS))


def _follows(entry: LedgerEntry, before: LedgerEntry) -> bool:
    return (entry.step, entry.first_row) == (before.step + 1, before.end_row)


def _describe_gap(before: LedgerEntry, entry: LedgerEntry) -> str:
    if entry.step == before.step + 1:
        return f"has rows of step {entry.step} that do not follow those of step {before.step}"
    return f"has no line between those of step {before.step} and step {entry.step}"


def _is_whole(line: dict[str, Any]) -> bool:
    """Tell whether a line has the fields of a step, and no unknown ones."""
    return set(FIELDS) <= set(line) <= {*FIELDS, *OPTIONAL} and has_step(line)
