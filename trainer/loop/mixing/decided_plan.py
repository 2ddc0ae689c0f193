"""A run's plan, with the decisions that all of its ranks know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ....dataplane.order.stream import Stream
from ....dataplane.runlog.decisions import RecordedDecision, add_decisions

if TYPE_CHECKING:
    from ....dataplane.order.plan import Plan


class DecidedPlan:
    """Grows by a decision at a time. Its stream is computed when rows are read."""

    def __init__(self, plan: Plan, recorded: Sequence[RecordedDecision] = ()) -> None:
        self.recorded = list(recorded)
        self.plan = add_decisions(plan, recorded)
        self._stream: Stream | None = None

    @property
    def stream(self) -> Stream:
        if self._stream is None:
            self._stream = Stream(self.plan)
        self._stream = self._stream.steer(self.plan)
        return self._stream

    def add(self, decisions: Sequence[RecordedDecision]) -> None:
        """Add the decisions that follow."""
        self.plan = add_decisions(self.plan, decisions)
        self.recorded += decisions

    def has_changed(self, num_decisions: int, step: int) -> bool:
        """Tell whether a decision after the first `num_decisions` holds at a step."""
        later = self.recorded[num_decisions : num_decisions + 1]
        return bool(later) and later[0].step <= step

    def digest(self, row: int) -> bytes:
        """Return the digest of the decision from `row` on; empty if there is none."""
        return self.plan.decision_digest(row)
