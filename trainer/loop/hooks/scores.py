"""Score planned checkpoints while the run trains."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...checkpoints.saver import Saver
from ...scores.at_checkpoints import CheckpointScores
from .hook import Hook

if TYPE_CHECKING:
    from ...checkpoints.store import RunState


class ScoreCheckpoints(Hook):
    """Scores the checkpoints that are due, on all ranks."""

    def __init__(self, scores: CheckpointScores, saver: Saver) -> None:
        self.scores = scores
        self.saver = saver

    def run_begins(self, state: RunState, *, resumed: bool) -> None:
        if resumed:
            self.scores.score_resumed(state.step)

    def saved(self, step: int) -> None:
        if self.scores.due(step):
            self.saver.wait()
            self.scores(step)
