"""Steps that would do harm: gradients that are not finite, and spikes of the loss.

    loss ─ all ranks know it before the last backward pass ─► a spike? ─► the step is made not
    finite, so that no engine applies it ─► skip · roll back · stop

A roll-back restores the weights of the newest checkpoint, never the row: the stream goes on, and
the ledger says which step was left out and which were taken back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from ...dataplane.order.timeline import PhaseRows, Step
from .batches import Plan
from .step_stats import Facts

Action = Literal["stop", "skip", "rollback"]

DEVIATION = 1.4826
"""Median distances from the median that make a standard deviation, of what is spread normally."""
LEAST_SPREAD = 1e-3
"""Of the median: losses that hardly differ are no reason to call the next a spike."""


def usual(losses: Sequence[float]) -> tuple[float, float]:
    """The median, and a deviation from it: neither is moved by one that stands out."""
    middle = median(losses)
    spread = DEVIATION * median([abs(loss - middle) for loss in losses])
    return middle, max(spread, LEAST_SPREAD * abs(middle))


@dataclass(frozen=True)
class Guard:
    """What is looked out for, and what is done about it."""

    not_finite: Action = "stop"
    spike: Action | Literal["none"] = "none"
    bound: float = 10.0
    window: int = 100
    rollbacks: int = 3

    @property
    def may_roll_back(self) -> bool:
        return "rollback" in (self.not_finite, self.spike)

    def is_spike(self, losses: Sequence[float], loss: float) -> bool:
        """Whether a loss stands out from those before it."""
        return self.spike != "none" and loss > self.limit(losses)

    def limit(self, losses: Sequence[float]) -> float:
        """The largest loss that is no spike. A few losses say nothing yet."""
        if len(losses) < max(2, self.window // 4):
            return math.inf
        middle, deviation = usual(losses)
        return middle + self.bound * deviation

    def remember(self, losses: Sequence[float], loss: float) -> tuple[float, ...]:
        """The latest losses, of steps that were applied."""
        if self.spike == "none":
            return ()
        return (*losses, loss)[-self.window :]


@dataclass(frozen=True)
class Harm:
    """A step that was not applied: why, and what was done."""

    kind: Literal["spike", "not finite"]
    action: Action
    limit: float | None = None
    """What the loss of a spike is above of."""
    back_to: int | None = None
    """The step of the checkpoint whose weights were restored."""

    def told(self, plan: Plan, step: Step[PhaseRows], facts: Facts) -> tuple[str, str]:
        """What happened, and where, for a person."""
        names = [source.name for source in plan.sources]
        by_source = ", ".join(
            f"{name} {loss / weight:.4g}"
            for name, loss, weight in zip(names, facts.losses, facts.weights, strict=True)
            if weight
        )
        what = f"the gradients are not finite (loss {facts.loss:.4g})"
        if self.kind == "spike":
            what = f"the loss is {facts.loss:.4g}, a spike above {self.limit:.4g}"
        where = (
            f"rows {step.first_row} to {step.last_row - 1}, phase "
            f"{step.phase.name}; loss by source: {by_source}"
        )
        return f"step {step.number}: {what}; the step changed nothing", where
