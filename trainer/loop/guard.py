"""Skipped steps: gradients that are not finite, and loss spikes.

    loss ─ known to the ranks that compute it before the optimizer step ─► a spike? ─► they ask to
    discard the gradients (engines/update.py), and no engine applies them ─► skip · roll back · stop

Without a guard against spikes (`spike: none`), ranks exchange nothing before the optimizer step.

A rollback restores the newest checkpoint's weights, never the row: the stream continues, and the
ledger records the skipped step and the steps that were rolled back.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from ...dataplane.order.timeline import PhaseRows, PlanStep
from .batches import RunPlan

if TYPE_CHECKING:
    from .step_stats import StepStats

SkipAction = Literal["stop", "skip", "rollback"]

DEVIATION = 1.4826
"""Standard deviation divided by median absolute deviation, for normal values."""
MIN_SPREAD = 1e-3
"""Minimum deviation relative to the median: after nearly equal losses, the next is no spike."""


def robust_center(losses: Collection[float]) -> tuple[float, float]:
    """Return the median and a robust deviation; a single outlier moves neither."""
    middle = median(losses)
    spread = DEVIATION * median([abs(loss - middle) for loss in losses])
    return middle, max(spread, MIN_SPREAD * abs(middle))


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Conditions that skip a step, and the action: skip, roll back or stop."""

    not_finite: SkipAction = "stop"
    """Action after a step whose gradients are not finite; such a step is never applied. stop: end
    the run; skip: continue; rollback: continue with the weights of the newest checkpoint."""
    spike: SkipAction | Literal["none"] = "none"
    """Action after a loss spike; none: apply the step like any other."""
    spike_bound: float = 10.0
    """A loss is a spike if it exceeds the median of earlier losses by so many deviations. A
    deviation is 1.48 times the median absolute deviation, which a single spike does not move."""
    spike_window: int = 100
    """Number of earlier losses to compare with; a quarter of them must exist before any spike."""
    rollbacks: int = 3
    """Maximum rollbacks to a checkpoint; the next ends the run. A checkpoint that an interruption
    saved does not count."""

    def __post_init__(self) -> None:
        for key, minimum in (("spike_bound", 0), ("spike_window", 4), ("rollbacks", 0)):
            if getattr(self, key) < minimum:
                raise ValueError(f"{key} must be at least {minimum}, not {getattr(self, key)}")

    @property
    def may_roll_back(self) -> bool:
        return "rollback" in (self.not_finite, self.spike)

    @property
    def needs_loss(self) -> bool:
        """True if the loss decides whether the step is applied."""
        return self.spike != "none"

    def is_spike(self, losses: Sequence[float], loss: float) -> bool:
        """Return True if the loss exceeds the limit that earlier losses set."""
        return self.needs_loss and loss > self.limit(losses)

    def limit(self, losses: Collection[float]) -> float:
        """Return the largest loss that is no spike; infinite while there are few losses."""
        if len(losses) < max(2, self.spike_window // 4):
            return math.inf
        middle, deviation = robust_center(losses)
        return middle + self.spike_bound * deviation

    def remember(self, losses: Sequence[float], loss: float) -> tuple[float, ...]:
        """Append `loss` to the losses of applied steps; keep the latest `spike_window`."""
        if not self.needs_loss:
            return ()
        return (*losses, loss)[-self.spike_window :]


class SpikeDetector:
    """Finds spikes among the losses since the start, also where none is skipped: such a step
    records all of its documents. All ranks see the same losses, and answer alike."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.losses: deque[float] = deque(maxlen=guard.spike_window)

    def detect(self, loss: float) -> bool:
        """Add a loss; returns True if it is a spike."""
        limit = self.guard.limit(self.losses)
        self.losses.append(loss)
        return loss > limit


@dataclass(frozen=True)
class SkippedStep:
    """Why a step was not applied, and the run's reaction."""

    kind: Literal["spike", "not finite"]
    action: SkipAction
    limit: float | None = None
    """The limit that a spike's loss exceeds."""
    back_to: int | None = None
    """Step of the restored checkpoint."""

    def message(
        self, plan: RunPlan, step: PlanStep[PhaseRows], stats: StepStats
    ) -> tuple[str, str]:
        """Return problem and place, for an error."""
        names = [source.name for source in plan.sources]
        by_source = ", ".join(
            f"{name} {loss / weight:.4g}"
            for name, loss, weight in zip(names, stats.losses, stats.weights, strict=True)
            if weight
        )
        problem = f"the gradients are not finite (loss {stats.loss:.4g})"
        if self.kind == "spike":
            problem = f"the loss is {stats.loss:.4g}, a spike above {self.limit:.4g}"
        where = (
            f"rows {step.first_row} to {step.end_row - 1}, phase "
            f"{step.phase.name}; loss by source: {by_source}"
        )
        return f"step {step.number}: {problem}; the step changed nothing", where
