"""Scores of a run's checkpoints, computed by its ranks while it trains.

The ranks of rank 0's machine load the checkpoint beside the model that trains, as `trainer eval`
does, so the scores are the same and neither weights, rows nor random state of the run change.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch.distributed as dist

from ...console.errors import PlanError, UserError
from ...console.log import get_logger
from ...dataplane.order.plan import Plan
from ..cluster.agreement import by_first, from_first
from ..folder import SCORES, RunFolder
from ..layout.devices import DeviceKind
from ..weights import sample, source
from ..weights.tokenizer import find_tokenizer
from . import records
from .answers import works_of
from .config import ScoresConfig
from .installed import check_installed
from .team import Team

if TYPE_CHECKING:
    from ...dataplane.tokenizers import Tokenizer
    from ...models.model import Model

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
        may have been killed before. Collective."""
        if not self.due(step):
            return
        scored = by_first(lambda: records.scored(self.folder, step), self.group)
        if not from_first(scored, self.group):
            self(step)

    def __call__(self, step: int) -> None:
        """Score the checkpoint of a step. A failure is logged, and the run goes on. Collective."""

        def load() -> tuple[Model, Tokenizer]:
            found = source.find(str(self.folder.root), step, average=self.config.ema)
            return sample.load(found, self.device), find_tokenizer(found, None)

        team = Team(
            works_of(load),
            self.group,
            workers=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
            beat=lambda: self.beat(f"scores of step {step}"),
        )
        team.lead(lambda: self._score(team, step))

    def _score(self, team: Team, step: int) -> None:
        from . import harness

        began = time.monotonic()
        try:
            found = source.find(str(self.folder.root), step, average=self.config.ema)
            tokenizer = find_tokenizer(found, None)
            sample.check_vocabulary(tokenizer, found.model)
            tasks = harness.load_tasks(self.config.tasks, self.config.include_path)
            entry = harness.evaluate(team, found, tokenizer, self.config, tasks)
            records.store(found, SCORES, entry)
        except UserError as error:
            hint = f"`trainer eval {self.folder.root} --step {step}` computes them"
            log.warning("no scores of step %d: %s; %s", step, error, hint)
        else:
            log.info("scored step %d in %.1f s", step, time.monotonic() - began)
