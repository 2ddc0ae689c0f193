"""Interface for hooks: what a run does beside its steps.

    run_begins
    step_begins ─► the loop launches the step ─► measure ─► step_done
                                                    └─► evaluated, save_begins, saved, sealed
    ended or failed, then close

To add a hook, write `hooks/NAME.py` (or a module in a room above, if the hook needs that room), and
add it to the list in launch/worker.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ....dataplane.order.timeline import PhaseRows, PlanStep

if TYPE_CHECKING:
    from ...checkpoints.store import RunState
    from ...engines.update import Update
    from ..evaluate import Evaluation
    from ..guard import SkippedStep
    from ..signals import GradientSquares, Layers
    from ..step_stats import StepStats


@dataclass(frozen=True)
class StepRecord:
    """Everything that is logged for a step."""

    step: PlanStep[PhaseRows]
    stats: StepStats
    update: Update
    lr: float
    seconds: float
    ledger: str
    skipped: SkippedStep | None = None
    """Why the step was not applied."""
    layers: Layers = field(default_factory=dict)
    """Signals by layer; empty in unwatched steps."""
    noise: GradientSquares | None = None
    """Squared gradient norms on two batches; None in steps that do not measure noise."""
    decision: str = ""
    """Digest of the decision whose shares hold from this step on; empty if there is none."""


class Hook:
    """Subclasses override the events on which they act.

    Every rank calls hooks in the same order, so a hook that all ranks have may communicate. The
    time of a step does not include `saved`.
    """

    def run_begins(self, state: RunState, *, resumed: bool) -> None:
        """Weights are loaded, from a checkpoint of this run if it is `resumed`."""

    def step_begins(self, step: int) -> None:
        """A step is about to be launched. On a GPU, the previous step may still run."""

    def measure(self) -> Mapping[str, Any]:
        """Return this rank's flags (step_stats.py) and metrics (metrics.py) for the step that has
        ended, by name."""
        return {}

    def step_done(self, record: StepRecord) -> None:
        """A step has ended, applied or not."""

    def evaluated(self, step: PlanStep[PhaseRows], evaluation: Evaluation) -> None:
        """The weights after `step` were evaluated."""

    def save_begins(self) -> None:
        """A checkpoint is about to be saved: it is never newer than the records on disk."""

    def saved(self, step: int) -> None:
        """Saving the planned checkpoint at `step` has begun."""

    def sealed(self, step: int, blocked: float, error: Exception | None) -> None:
        """A save has ended, with or without an error. It blocked training for `blocked` seconds."""

    def ended(self, state: RunState, *, finished: bool) -> None:
        """This start's last step has ended. `finished`: it was the plan's last step."""

    def failed(self, step: int, error: Exception) -> None:
        """The run has failed after so many steps."""

    def close(self) -> None:
        """Write what is buffered. Called last, whether the run failed or not."""


class Hooks(Hook):
    """Calls hooks in turn."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self.hooks = list(hooks)

    def run_begins(self, state: RunState, *, resumed: bool) -> None:
        for hook in self.hooks:
            hook.run_begins(state, resumed=resumed)

    def step_begins(self, step: int) -> None:
        for hook in self.hooks:
            hook.step_begins(step)

    def measure(self) -> Mapping[str, Any]:
        return {key: number for hook in self.hooks for key, number in hook.measure().items()}

    def step_done(self, record: StepRecord) -> None:
        for hook in self.hooks:
            hook.step_done(record)

    def evaluated(self, step: PlanStep[PhaseRows], evaluation: Evaluation) -> None:
        for hook in self.hooks:
            hook.evaluated(step, evaluation)

    def save_begins(self) -> None:
        for hook in self.hooks:
            hook.save_begins()

    def saved(self, step: int) -> None:
        for hook in self.hooks:
            hook.saved(step)

    def sealed(self, step: int, blocked: float, error: Exception | None) -> None:
        for hook in self.hooks:
            hook.sealed(step, blocked, error)

    def ended(self, state: RunState, *, finished: bool) -> None:
        for hook in self.hooks:
            hook.ended(state, finished=finished)

    def failed(self, step: int, error: Exception) -> None:
        for hook in self.hooks:
            hook.failed(step, error)

    def close(self) -> None:
        for hook in self.hooks:
            hook.close()
