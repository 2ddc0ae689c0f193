"""A plan's phases as the model gets their rows: one phase for each length of a step's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .plan import Plan
from .stream import Stream
from .timeline import PhaseRows, PlanStep


class SteppedPlan(Protocol):
    """A plan for a mixture, or for synthetic rows."""

    @property
    def phases(self) -> Sequence[PhaseRows]: ...
    @property
    def lengths(self) -> Sequence[int]: ...
    def step(self, number: int) -> PlanStep[PhaseRows]: ...


@dataclass(frozen=True, kw_only=True)
class LengthRows(PhaseRows):
    """The steps of a phase whose rows have one length. Rows are those that the model gets."""

    phase: PhaseRows

    @property
    def whole(self) -> PhaseRows:
        return self.phase


def count_rows_by_length(
    lengths: Sequence[int], phase: PhaseRows, rows: Sequence[int]
) -> dict[int, int]:
    """Return the plan's rows by the length of the model's, the shortest first. `rows` are the
    phase's, by source."""
    rows_by_length = Counter[int]()
    for length, count in zip(lengths, rows, strict=True):
        rows_by_length[length or phase.seq_len] += count
    return {length: count for length, count in sorted(rows_by_length.items()) if count}


def split_by_length(plan: SteppedPlan) -> list[PhaseRows]:
    """Return the phases. One with steps by length is a phase for each length."""
    if not plan.lengths:
        return list(plan.phases)
    assert isinstance(plan, Plan)
    return list(_split_phases(plan))


def _split_phases(plan: Plan) -> Iterator[LengthRows]:
    stream = Stream(plan)
    for phase in plan.phases:
        rows = stream.counts(phase.end_row) - stream.counts(phase.first_row)
        for length, count in count_rows_by_length(plan.lengths, phase, rows.tolist()).items():
            pieces = phase.seq_len // length
            yield LengthRows(
                name=_name(phase, length),
                first_row=phase.first_row,
                first_step=phase.first_step,
                first_token=phase.first_token,
                rows=count * pieces,
                seq_len=length,
                batch_rows=phase.batch_rows * pieces,
                phase=phase,
            )


def name_steps(plan: SteppedPlan, numbers: Sequence[int]) -> list[str]:
    """Return the names that the phases of these steps have in `split_by_length`."""
    steps = [plan.step(number) for number in numbers]
    if not plan.lengths or not steps:
        return [step.phase.name for step in steps]
    assert isinstance(plan, Plan)
    rows = np.array([step.first_row for step in steps], np.int64)
    sources, _ = Stream(plan).assignment.locate(rows - plan.first_row)
    return [
        _name(step.phase, plan.lengths[source] or step.phase.seq_len)
        for step, source in zip(steps, sources.tolist(), strict=True)
    ]


def _name(phase: PhaseRows, length: int) -> str:
    return f"{phase.name}/{length}"
