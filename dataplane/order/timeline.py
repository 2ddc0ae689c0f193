"""Consecutive phases, as rows, optimizer steps and tokens. Ends are exclusive.

rows    0 ─────────────── stable ───────────────┬────── anneal ──────┐
steps   a step has `batch_rows` rows; no step crosses from a phase into the next
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar


@dataclass(frozen=True, kw_only=True)
class PhaseRows:
    """A phase, as rows, steps and tokens."""

    name: str
    first_row: int
    first_step: int
    first_token: int
    rows: int
    seq_len: int
    batch_rows: int

    @property
    def whole(self) -> PhaseRows:
        """The plan's phase, where the model gets its rows in pieces (row_lengths.py)."""
        return self

    @property
    def tokens(self) -> int:
        return self.rows * self.seq_len

    @property
    def steps(self) -> int:
        return self.rows // self.batch_rows

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows

    @property
    def end_step(self) -> int:
        return self.first_step + self.steps

    @property
    def end_token(self) -> int:
        return self.first_token + self.tokens


P = TypeVar("P", bound=PhaseRows, covariant=True)


@dataclass(frozen=True, kw_only=True)
class PlanStep(Generic[P]):
    """An optimizer step, with its rows."""

    number: int
    first_row: int
    rows: int
    phase: P
    first_token: int
    """Tokens in all earlier steps."""

    @property
    def end_row(self) -> int:
        return self.first_row + self.rows

    @property
    def end_token(self) -> int:
        return self.first_token + self.rows * self.phase.seq_len


class PhaseTimeline(Generic[P]):
    """Rows, steps and tokens over consecutive phases."""

    if TYPE_CHECKING:

        @property
        def phases(self) -> Sequence[P]: ...

    @property
    def first_row(self) -> int:
        return self.phases[0].first_row

    @property
    def end_row(self) -> int:
        return self.phases[-1].end_row

    @property
    def rows(self) -> int:
        return self.end_row - self.first_row

    @property
    def first_token(self) -> int:
        return self.phases[0].first_token

    @property
    def end_token(self) -> int:
        return self.phases[-1].end_token

    @property
    def first_step(self) -> int:
        return self.phases[0].first_step

    @property
    def end_step(self) -> int:
        return self.phases[-1].end_step

    @property
    def steps(self) -> int:
        return self.end_step - self.first_step

    @property
    def tokens(self) -> int:
        return sum(phase.tokens for phase in self.phases)

    def step(self, number: int) -> PlanStep[P]:
        if not self.first_step <= number < self.end_step:
            raise IndexError(f"step {number} is not in [{self.first_step}, {self.end_step})")
        phase = next(p for p in reversed(self.phases) if p.first_step <= number)
        rows_before = (number - phase.first_step) * phase.batch_rows
        return PlanStep(
            number=number,
            first_row=phase.first_row + rows_before,
            rows=phase.batch_rows,
            phase=phase,
            first_token=phase.first_token + rows_before * phase.seq_len,
        )

    def phase_at(self, row: int) -> P:
        if not self.first_row <= row < self.end_row:
            raise IndexError(f"row {row} is not in [{self.first_row}, {self.end_row})")
        return next(phase for phase in reversed(self.phases) if phase.first_row <= row)

    def step_at(self, row: int) -> PlanStep[P]:
        """Return the step that trains on `row`."""
        phase = self.phase_at(row)
        return self.step(phase.first_step + (row - phase.first_row) // phase.batch_rows)
