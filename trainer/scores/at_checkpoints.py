"""Scores of a run's checkpoints, computed by its ranks while it trains.

The ranks of rank 0's machine load the checkpoint beside the model that trains, as `trainer eval`
does, so the scores are the same and neither weights, rows nor random state of the run change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch.distributed as dist

from ...console.errors import PlanError, UserError
from ...console.log import get_logger
from ...dataplane.order.plan import Plan
from ..cluster.agreement import by_first, from_first
from ..cluster.lost_ranks import LostRankError
from ..folders.folder import SCORES, RunFolder
from ..layout.devices import DeviceKind
from ..weights import sample, source
from ..weights.tokenizer import find_tokenizer
from . import records
from .answers import works_of
from .config import ScoresConfig, check_installed
from .missing import Missing, failed, unanswered
from .team import Team

if TYPE_CHECKING:
    from ...dataplane.tokenizers import Tokenizer
    from ...models.model.model import Model

log = get_logger(__name__)


def check(config: ScoresConfig, plan: object) -> None:
    """Raise if the tasks cannot be scored: before the run starts, not at its first checkpoint."""
    if not isinstance(plan, Plan):
        raise PlanError(
            "scores needs a mixture: synthetic rows have no tokenizer",
            hint="remove scores, or give --mixture FILE.yaml",
        )
    check_installed("scores")
    from . import harness

    harness.load_tasks(config.tasks, config.include_path)


class CheckpointScores:
    """Scores the checkpoints of a run that are due."""

    def __init__(
        self,
        config: ScoresConfig,
        folder: RunFolder,
        last_step: int,
        device: DeviceKind,
        group: dist.ProcessGroup,
        beat: Callable[[str], None],
    ) -> None:
        self.config, self.folder, self.last_step = config, folder, last_step
        self.device, self.group, self.beat = device, group, beat

    def due(self, step: int) -> bool:
        return step > 0 and (step % self.config.every == 0 or step == self.last_step)

    def take_up(self, step: int) -> None:
        """Score the checkpoint that a run resumes from, if it is due and was not scored: the run
        may have been killed before. Tasks that failed are not tried again. Collective."""
        if not self.due(step):
            return
        own = self.config

        def owed() -> tuple[str, ...]:
            entries = records.entries(self.folder)
            return unanswered(own.tasks, entries, step, limit=own.limit, ema=own.ema)

        if tasks := from_first(by_first(owed, self.group), self.group):
            self._score_tasks(step, tasks)

    def __call__(self, step: int) -> None:
        """Score the checkpoint of a step. A failure is recorded, and the run goes on.
        Collective."""
        self._score_tasks(step, self.config.tasks)

    def _score_tasks(self, step: int, tasks: tuple[str, ...]) -> None:

        def load() -> tuple[Model, Tokenizer]:
            found = source.find(str(self.folder.root), step, average=self.config.ema)
            return sample.load(found, self.device), find_tokenizer(found, None)

        team = Team(
            works_of(load),
            self.group,
            workers=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            beat=lambda: self.beat(f"scores of step {step}"),
        )
        team.lead(lambda: self._score(team, step, replace(self.config, tasks=tasks)))

    def _score(self, team: Team, step: int, config: ScoresConfig) -> None:
        from . import harness

        began = time.monotonic()
        found = source.find(str(self.folder.root), step, average=config.ema)
        try:
            tokenizer = find_tokenizer(found, None)
            sample.check_vocabulary(tokenizer, found.model)
            index = harness.load_tasks(config.tasks, config.include_path)
            entry, errors = harness.evaluate(team, found, tokenizer, config, index)
        except LostRankError:
            raise
        except UserError as error:  # of all tasks
            entry, errors = failed(config.tasks, error), [error]
        records.store(found, SCORES, entry)
        again = f"`{Missing(step, config.tasks).command(str(self.folder.root))}` tries again"
        for each in errors:
            log.warning("no scores of step %d: %s; %s", step, each, again)
        if entry["tasks"]:
            log.info("scored step %d in %.1f s", step, time.monotonic() - began)
