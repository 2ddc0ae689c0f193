"""Weights & Biases: `watch.wandb: PROJECT` (extra `headrace[wandb]`)."""

from __future__ import annotations

from ..config import WatchConfig
from ..logger import LoggedRun, ScalarLogger


class WeightsAndBiases(ScalarLogger):
    """One page for a run's folder; each start continues it."""

    package = "wandb"

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        super().__init__(run)
        folder = run.folder.root
        self.page = wandb.init(
            project=run.watch.wandb,
            name=folder.name,
            id=run.id,
            resume="allow",
            dir=str(folder),
        )

    @classmethod
    def enabled(cls, watch: WatchConfig) -> bool:
        return watch.wandb is not None

    def scalars(self, values: dict[str, float], step: int) -> None:
        self.page.log(values, step=step)

    def close(self) -> None:
        self.page.finish()
