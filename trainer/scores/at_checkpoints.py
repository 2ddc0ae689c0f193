"""Score checkpoints on the run's ranks while it trains.

The ranks on rank 0's machine load the checkpoint beside the model in training, as `trainer eval`
does: the scores are the same, and the run's weights, rows and random state do not change.
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
from ..cluster.agreement import broadcast_first, run_on_first
from ..cluster.lost_ranks import LostRankError
from ..folders.folder import SCORES, RunFolder
from ..layout.devices import DeviceKind
from ..placement.team import Team
from ..weights import sample, source
from ..weights.tokenizer import find_tokenizer
from . import records
from .answers import batch_functions
from .config import ScoresConfig, check_installed
from .missing import ScoreGap, failure_entry, unanswered_tasks

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
    """Scores a run's checkpoints, every `config.every` steps and at the last one."""

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

    def score_resumed(self, step: int) -> None:
        """Score the checkpoint from which a run resumes, if it is due and was not scored: the run
        may have been killed before. Tasks that failed are not tried again. Collective."""
        if not self.due(step):
            return

        def read_unanswered() -> tuple[str, ...]:
            config, entries = self.config, records.read_entries(self.folder)
            return unanswered_tasks(config.tasks, entries, step, limit=config.limit, ema=config.ema)

        if tasks := broadcast_first(run_on_first(read_unanswered, self.group), self.group):
            self._score_tasks(step, tasks)

    def __call__(self, step: int) -> None:
        """Score the checkpoint at `step`. A failure is recorded, and the run goes on.
        Collective."""
        self._score_tasks(step, self.config.tasks)

    def _score_tasks(self, step: int, tasks: tuple[str, ...]) -> None:

        def load() -> tuple[Model, Tokenizer]:
            weights = source.find(str(self.folder.root), step, average=self.config.ema)
            return sample.load(weights, self.device), find_tokenizer(weights, None)

        team = Team(
            batch_functions(load),
            self.group,
            workers=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            beat=lambda: self.beat(f"scores of step {step}"),
        )
        team.lead(lambda: self._score(team, step, replace(self.config, tasks=tasks)))

    def _score(self, team: Team, step: int, config: ScoresConfig) -> None:
        from . import harness

        start = time.monotonic()
        weights = source.find(str(self.folder.root), step, average=config.ema)
        try:
            tokenizer = find_tokenizer(weights, None)
            sample.check_vocabulary(tokenizer, weights.model)
            manager = harness.load_tasks(config.tasks, config.include_path)
            entry, errors = harness.evaluate(team, weights, tokenizer, config, manager)
        except LostRankError:
            raise
        except UserError as error:  # all tasks fail
            entry, errors = failure_entry(config.tasks, error), [error]
        records.store(weights, SCORES, entry)
        hint = f"`{ScoreGap(step, config.tasks).command(str(self.folder.root))}` tries again"
        for failure in errors:
            log.warning("no scores of step %d: %s; %s", step, failure, hint)
        if entry["tasks"]:
            log.info("scored step %d in %.1f s", step, time.monotonic() - start)
