"""Rank 0's part in decisions: take requests, ask controllers, record.

    step s is read ─► request or controller ─► decision from step s + 2 on ─► decisions.jsonl,
    durable ─► the message of step s tells all ranks that there is one

Nothing depends on the clock. A kill before the line is durable leaves the request, or what the
controller has observed in the checkpoint: the next start decides. A kill after it leaves a decision
that the next start replays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ....console.errors import PlanError
from ....console.log import get_logger
from ....dataplane.runlog import decisions as files
from ....dataplane.runlog.decisions import RecordedDecision
from ....mixtures.controllers import load_controller
from ....mixtures.controllers.controller import Observed
from ....mixtures.steering.decide import (
    LEAD_STEPS,
    decide_by_controller,
    decide_by_hand,
    last_state,
)
from ....mixtures.steering.request import find_request, remove_request
from ...folders.folder import NOT_STEERED, STEERED

if TYPE_CHECKING:
    from ..evaluate import Evaluation
    from ..step_stats import StepStats
    from .decided_plan import DecidedPlan

Record = Callable[..., None]
"""Records an event: kind, step, details."""
log = get_logger(__name__)


class Pilot:
    """Makes the decisions of a run."""

    def __init__(
        self, decided: DecidedPlan, folder: Path, observed: Mapping[str, Any], record: Record
    ) -> None:
        """`observed`: what a checkpoint has kept, `state`."""
        self.decided = decided
        self.folder = folder
        self.record = record
        self.step = 0
        """The step that is read next."""
        self._observed: dict[str, Any] = dict(observed)
        self._pending: list[RecordedDecision] = []

    @property
    def state(self) -> Mapping[str, Any]:
        """What checkpoints keep; empty for a run without decisions and controllers."""
        # A copy: a thread writes the checkpoint while the next steps are observed.
        state = deepcopy({key: value for key, value in self._observed.items() if value})
        if self.decided.recorded:
            state["decisions"] = len(self.decided.recorded)
        return state

    def decide(self) -> bool:
        """Make a decision if one is due, and record it. Returns True if there is one."""
        first_step = self.step + LEAD_STEPS
        decision = self._follow_request(first_step) or self._ask_controller(first_step)
        if decision is None:
            return False
        self._pending.append(decision)
        return True

    def take(self) -> list[RecordedDecision]:
        """Return the decisions that the ranks do not know yet."""
        taken, self._pending = self._pending, []
        for decision in taken:
            shares = ", ".join(f"{name} {share:.2%}" for name, share in decision.shares.items())
            message = f"from step {decision.step:,} on, by {decision.by}: {shares}"
            self.record(STEERED, self.step, what=message)
        return taken

    def observe_step(self, step: int, stats: StepStats | None) -> None:
        """Note the losses of a step, if its phase has a controller. `stats` are None if the step
        was skipped: a spike must not draw shares to its source."""
        self.step = step + 1
        if not self._watches(step) or stats is None:
            return
        names = [source.name for source in self.decided.plan.sources]
        sums = self._observed.setdefault("sums", {})
        for name, loss, weight in zip(names, stats.losses, stats.weights, strict=True):
            if weight and loss - loss == 0:
                before = sums.get(name, (0.0, 0.0))
                sums[name] = [before[0] + loss, before[1] + weight]

    def observe_evaluation(self, step: int, evaluation: Evaluation) -> None:
        """Note a held-out loss, if the phase has a controller."""
        if not self._watches(step):
            return
        controller = load_controller(self.decided.plan.step(step).phase.control)
        columns = zip(
            evaluation.names, evaluation.stats.losses, evaluation.stats.weights, strict=True
        )
        pairs = [
            (loss, weight) for name, loss, weight in columns if controller.watched in (None, name)
        ]
        weight = sum(weight for _, weight in pairs)
        loss = sum(loss for loss, _ in pairs)
        if weight and loss - loss == 0:
            self._observed.setdefault("held_out", []).append(loss / weight)

    def _watches(self, step: int) -> bool:
        """Tell whether a step's phase has a controller; forget what another phase has observed."""
        phase = self.decided.plan.step(step).phase
        if self._observed.get("phase", phase.name) != phase.name:
            self._observed.clear()
        if phase.control:
            self._observed["phase"] = phase.name
        return bool(phase.control)

    def _follow_request(self, first_step: int) -> RecordedDecision | None:
        try:
            request = find_request(self.folder)
            if request is None:
                return None
            if any(request.id == decision.why.get("request") for decision in self.decided.recorded):
                remove_request(self.folder)  # a kill came between the record and this
                return None
            if request.step is not None and self._is_controlled(first_step, request.step):
                return None  # decisions follow each other: the controller's come first
            decision = decide_by_hand(
                self.decided.stream,
                self.decided.recorded,
                request.shares,
                first_step,
                request.step,
                request.id,
            )
        except PlanError as error:
            log.warning("the request to steer is refused: %s", error.message)
            self.record(NOT_STEERED, self.step, what=error.message)
            remove_request(self.folder)
            return None
        files.append(self.folder / files.NAME, decision)
        remove_request(self.folder)
        return decision

    def _is_controlled(self, first_step: int, end_step: int) -> bool:
        """Tell whether a phase with a controller ends between two steps."""
        phases = self.decided.plan.phases
        return any(phase.control and first_step < phase.end_step <= end_step for phase in phases)

    def _ask_controller(self, first_step: int) -> RecordedDecision | None:
        plan, recorded, at = self.decided.plan, self.decided.recorded, self.step
        if first_step >= plan.end_step:
            return None
        phase = plan.step(at).phase
        if not phase.control or plan.step(first_step).phase is not phase:
            return None
        controller = load_controller(phase.control)
        state = last_state(plan, recorded, phase.control["kind"], at)
        observed = self._summarize()
        if not controller.is_due(at - phase.first_step, observed, state):
            return None
        self._observed.clear()
        if recorded and recorded[-1].step >= first_step:
            return None  # this start repeats steps after which the run has decided
        decision = decide_by_controller(self.decided.stream, recorded, at, first_step, observed)
        if decision is None:
            self.record(
                NOT_STEERED, at, what=f"no shares of {phase.control['kind']} fit max_epochs"
            )
            return None
        files.append(self.folder / files.NAME, decision)
        return decision

    def _summarize(self) -> Observed:
        sums = self._observed.get("sums", {})
        losses = {name: loss / weight for name, (loss, weight) in sums.items()}
        return Observed(losses=losses, held_out=self._observed.get("held_out", []))
