"""Shares that change while a run goes on: rank 0 decides, a step's message tells all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .hook import Hook, StepRecord

if TYPE_CHECKING:
    import torch.distributed as dist

    from ....dataplane.order.timeline import PhaseRows, PlanStep
    from ...checkpoints.store import RunState
    from ..evaluate import Evaluation
    from ..mixing.decided_plan import DecidedPlan
    from ..mixing.pilot import Pilot


class Steering(Hook):
    """Adds decisions to the plan of all ranks."""

    def __init__(
        self, decided: DecidedPlan, pilot: Pilot | None, control: dist.ProcessGroup
    ) -> None:
        """`pilot` is given on rank 0."""
        self.decided = decided
        self.pilot = pilot
        self.control = control

    @property
    def state(self) -> Mapping[str, Any]:
        """What a checkpoint keeps."""
        return {} if self.pilot is None else self.pilot.state

    def digest(self, row: int) -> bytes:
        """Return the digest of the decision from `row` on; empty if there is none."""
        return self.decided.digest(row)

    def run_begins(self, state: RunState, *, resumed: bool) -> None:
        if self.pilot is not None:
            self.pilot.step = state.step

    def measure(self) -> Mapping[str, Any]:
        return {"steered": self.pilot.decide()} if self.pilot is not None else {}

    def step_done(self, record: StepRecord) -> None:
        if record.stats.steered:
            from ...cluster.agreement import broadcast_first

            taken = self.pilot.take() if self.pilot is not None else []
            self.decided.add(broadcast_first(taken, self.control))
        if self.pilot is not None:
            stats = record.stats if record.skipped is None else None
            self.pilot.observe_step(record.step.number, stats)

    def evaluated(self, step: PlanStep[PhaseRows], evaluation: Evaluation) -> None:
        if self.pilot is not None:
            self.pilot.observe_evaluation(step.number, evaluation)
