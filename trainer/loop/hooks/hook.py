"""Interface of a hook: what a run does beside its steps.

    run_begins
    step_begins ─► the loop launches the step ─► measure ─► step_done
                                                    └─► evaluated, save_begins, saved, sealed
    ended or failed, then close

To add one, write `hooks/NAME.py` (or a module of a room above, if the hook needs it), and add it to
the list in launch/worker.py.
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
    """Everything that is logged of one step."""

    step: PlanStep[PhaseRows]
    stats: StepStats
    update: Update
    lr: float
    seconds: float
    ledger: str
    skipped: SkippedStep | None = None
    """Why the step was not applied."""
    layers: Layers = field(default_factory=dict)
    """Signals by layer, in a step that records them."""
    noise: GradientSquares | None = None
    """Squares of the gradient's norm on two batches, in a step that measures its noise."""


class Hook:
    """A subclass overrides the methods of the events on which it acts.

    Every rank calls its hooks in the same order, so a hook that all ranks have may communicate. The
    time of `saved` is not part of a step's time.
    """

    def run_begins(self, state: RunState, *, resumed: bool) -> None:
        """The weights of `state` are loaded: those of a checkpoint of the run, if it is resumed."""

    def step_begins(self, step: int) -> None:
        """A step is about to be launched. On a GPU the step before it may still run."""

    def measure(self) -> Mapping[str, Any]:
        """Return this rank's flags and metrics of the step that has ended, by their names in
        step_stats.py and in the table of metrics."""
        return {}

    def step_done(self, record: StepRecord) -> None:
        """A step has ended, applied or not."""

    def evaluated(self, step: PlanStep[PhaseRows], evaluation: Evaluation) -> None:
        """The weights after `step` were evaluated."""

    def save_begins(self) -> None:
        """A checkpoint is about to be saved: it is never newer than the records on disk."""

    def saved(self, step: int) -> None:
        """The save of the planned checkpoint of `step` has begun."""

    def sealed(self, step: int, blocked: float, error: Exception | None) -> None:
        """A save has ended, with an error or without. It blocked the steps for `blocked`
        seconds."""

    def ended(self, state: RunState, *, finished: bool) -> None:
        """The last step of this start has ended; `finished`: it is the last of the plan."""

    def failed(self, step: int, error: Exception) -> None:
        """The run has failed after so many steps."""

    def close(self) -> None:
        """Write what is buffered. Called last, whether the run failed or not."""


class Hooks(Hook):
    """Hooks that are called in turn."""

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        self.hooks = list(hooks)

    def run_begins(self, state: RunState, *, resumed: bool) -> None:
        for hook in self.hooks:
            hook.run_begins(state, resumed=resumed)

    def step_begins(self, step: int) -> None:
        for hook in self.hooks:
            hook.step_begins(step)

    def measure(self) -> Mapping[str, Any]:
        return {name: number for hook in self.hooks for name, number in hook.measure().items()}

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
