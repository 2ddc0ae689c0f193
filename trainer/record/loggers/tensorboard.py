"""TensorBoard's files in the run's folder: `watch.tensorboard`, on by default."""

from __future__ import annotations

from importlib.util import find_spec

from ..config import WatchConfig
from ..logger import LoggedRun, ScalarLogger


class TensorBoard(ScalarLogger):
    def __init__(self, run: LoggedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        super().__init__(run)
        self.writer = SummaryWriter(str(run.folder.tensorboard), purge_step=run.first_step)

    @classmethod
    def enabled(cls, watch: WatchConfig) -> bool:
        """Return whether the configuration asks for it and the machine has TensorBoard."""
        return watch.tensorboard and find_spec("tensorboard") is not None

    def scalars(self, values: dict[str, float], step: int) -> None:
        for curve, value in values.items():
            self.writer.add_scalar(curve, value, step)

    def close(self) -> None:
        self.writer.close()
