"""Controller held-out: a schedule of shares that advances where the held-out loss stalls.

    stage     the phase's weights │ stages[0] │ stages[1] …
    loss      3.1  2.8  2.7  2.7  │           `patience` evaluations without a new best one

The best loss starts anew with each stage.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .controller import Controller, Observed, Shares, State

TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class HeldOut(Controller):
    """Stages of shares; the next begins where the held-out loss no longer falls."""

    kind: Literal["held-out"] = "held-out"
    """A schedule of shares; the next stage begins where the held-out loss stalls."""
    stages: tuple[dict[str, float], ...] = ()
    """Shares of the sources in each stage; the weights of the phase are the stage before them."""
    patience: int = 2
    """Evaluations without a new best loss that end a stage."""
    min_change: float = 0.0
    """Nats by which a loss must fall below the best to be a new one."""
    source: str | None = None
    """Source whose held-out loss counts. Default: the mean of all evaluated sources."""

    def is_due(self, steps: int, observed: Observed, state: State) -> bool:
        if state.get("stage", 0) >= len(self.stages):
            return False
        best, waited = math.inf, 0
        for loss in observed.held_out:
            waited = 0 if loss < best - self.min_change else waited + 1
            best = min(best, loss)
        return waited >= self.patience

    def decide(self, shares: Shares, observed: Observed, state: State) -> tuple[Shares, State]:
        stage = state.get("stage", 0)
        return {source: self.stages[stage].get(source, 0.0) for source in shares}, {
            "stage": stage + 1
        }

    def bounds(self, shares: Shares, steps: int) -> Mapping[str, tuple[float, float]]:
        stages = [shares, *self.stages]
        return {
            source: (
                min(s.get(source, 0.0) for s in stages),
                max(s.get(source, 0.0) for s in stages),
            )
            for source in shares
        }

    def problems(self) -> Iterator[tuple[str, str]]:
        if not self.stages:
            yield "stages", "is empty; name the shares of at least one stage"
        for number, stage in enumerate(self.stages):
            total = math.fsum(stage.values())
            if any(not math.isfinite(share) or share < 0 for share in stage.values()):
                yield "stages", f"stage {number} has a share below 0"
            elif abs(total - 1) > TOLERANCE:
                yield (
                    "stages",
                    f"the shares of stage {number} sum to {total:.6g}; they must sum to 1",
                )
        if self.patience < 1:
            yield "patience", f"is {self.patience}; it must be at least 1"
        if not (math.isfinite(self.min_change) and self.min_change >= 0):
            yield "min_change", f"is {self.min_change:g}; it must be at least 0"

    def source_problems(self, sources: Sequence[str]) -> Iterator[tuple[str, str]]:
        yield from super().source_problems(sources)
        for number, stage in enumerate(self.stages):
            for unknown in sorted(set(stage) - set(sources)):
                yield (
                    "stages",
                    f"stage {number} names {unknown}; the phase draws from {', '.join(sources)}",
                )

    @property
    def needs_evaluations(self) -> bool:
        return True

    @property
    def watched(self) -> str | None:
        return self.source
