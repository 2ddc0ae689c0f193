"""Skipped steps: gradients that are not finite, and loss spikes.

    loss ─ known to the ranks that compute it before the optimizer step ─► a spike? ─► they ask to
    discard the gradients (engines/update.py), and no engine applies them ─► skip · roll back · stop

Without a guard against spikes (`spike: none`) the ranks exchange nothing before that step.

A rollback restores the weights of the newest checkpoint, never the row: the stream continues, and
the ledger records the skipped step and the steps that were rolled back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Literal

from ...dataplane.order.timeline import PhaseRows, PlanStep
from .batches import RunPlan

if TYPE_CHECKING:
    from .step_stats import StepStats

SkipAction = Literal["stop", "skip", "rollback"]

DEVIATION = 1.4826
"""Ratio of the standard deviation to the median absolute deviation, for normal values."""
LEAST_SPREAD = 1e-3
"""Least deviation, relative to the median: nearly equal losses do not make the next a spike."""


def usual(losses: Sequence[float]) -> tuple[float, float]:
    """Return the median and a robust deviation; one outlier moves neither."""
    middle = median(losses)
    spread = DEVIATION * median([abs(loss - middle) for loss in losses])
    return middle, max(spread, LEAST_SPREAD * abs(middle))


@dataclass(frozen=True, kw_only=True)
class Guard:
    """Conditions that skip a step, and the action: skip, roll back or stop."""

    not_finite: SkipAction = "stop"
    """Action after a step whose gradients are not finite; such a step is never applied. stop: end
    the run; skip: continue; rollback: continue with the weights of the newest checkpoint."""
    spike: SkipAction | Literal["none"] = "none"
    """Action after a loss spike; none: apply the step like any other."""
    spike_bound: float = 10.0
    """Deviations above the median of the losses before it that make a loss a spike. A deviation is
    1.48 times the median absolute deviation, which one spike does not move."""
    spike_window: int = 100
    """Losses that a loss is compared with; no loss is a spike before a quarter of them exist."""
    rollbacks: int = 3
    """Most rollbacks to one checkpoint; the next ends the run. A checkpoint that an interruption
    saved does not count."""

    def __post_init__(self) -> None:
        for name, least in (("spike_bound", 0), ("spike_window", 4), ("rollbacks", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")

    @property
    def may_roll_back(self) -> bool:
        return "rollback" in (self.not_finite, self.spike)

    @property
    def needs_loss(self) -> bool:
        """True if the loss decides whether the step is applied."""
        return self.spike != "none"

    def is_spike(self, losses: Sequence[float], loss: float) -> bool:
        """Return True if the loss stands out from the losses before it."""
        return self.needs_loss and loss > self.limit(losses)

    def limit(self, losses: Sequence[float]) -> float:
        """Return the largest loss that is not a spike; infinite while there are few losses."""
        if len(losses) < max(2, self.spike_window // 4):
            return math.inf
        middle, deviation = usual(losses)
        return middle + self.spike_bound * deviation

    def remember(self, losses: Sequence[float], loss: float) -> tuple[float, ...]:
        """Return the latest losses of applied steps, with `loss` at the end."""
        if not self.needs_loss:
            return ()
        return (*losses, loss)[-self.spike_window :]


@dataclass(frozen=True)
class SkippedStep:
    """Why a step was not applied, and what the run did."""

    kind: Literal["spike", "not finite"]
    action: SkipAction
    limit: float | None = None
    """The limit that a spike's loss exceeds."""
    back_to: int | None = None
    """Step of the checkpoint whose weights were restored."""

    def message(
        self, plan: RunPlan, step: PlanStep[PhaseRows], stats: StepStats
    ) -> tuple[str, str]:
        """Return what happened and where, for an error."""
        names = [source.name for source in plan.sources]
        by_source = ", ".join(
            f"{name} {loss / weight:.4g}"
            for name, loss, weight in zip(names, stats.losses, stats.weights, strict=True)
            if weight
        )
        what = f"the gradients are not finite (loss {stats.loss:.4g})"
        if self.kind == "spike":
            what = f"the loss is {stats.loss:.4g}, a spike above {self.limit:.4g}"
        where = (
            f"rows {step.first_row} to {step.end_row - 1}, phase "
            f"{step.phase.name}; loss by source: {by_source}"
        )
        return f"step {step.number}: {what}; the step changed nothing", where
