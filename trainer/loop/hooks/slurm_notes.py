"""Notes from rank 0 to the batch script, which decides whether Slurm requeues the job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...cluster import slurm
from .hook import Hook

if TYPE_CHECKING:
    from ...checkpoints.store import RunState


class SlurmNotes(Hook):
    """Notes when a checkpoint is sealed, and how the run ends."""

    def __init__(self, stop_after: int | None) -> None:
        """A run that stops at `stop_after`, as a person asked, is not requeued."""
        self.stop_after = stop_after

    def sealed(self, step: int, blocked: float, error: Exception | None) -> None:
        if error is None:
            slurm.write_note("saved", step)

    def ended(self, state: RunState, *, finished: bool) -> None:
        if finished:
            slurm.write_note("finished", state.step)
        elif state.step == self.stop_after:
            slurm.write_note("stopped", state.step)

    def failed(self, step: int, error: Exception) -> None:
        slurm.write_note("failed", step)
