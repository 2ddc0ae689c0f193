"""Table of loggers. One file each; see `trainer/record/logger.py` for the interface."""

from __future__ import annotations

from importlib.util import find_spec

from ....console.errors import MissingError
from ..config import WatchConfig
from ..logger import LoggedRun, Logger
from .jsonl import JsonLines
from .mlflow import MLflow
from .tensorboard import TensorBoard
from .terminal import Terminal
from .wandb import WeightsAndBiases

LOGGERS: dict[str, type[Logger]] = {
    "jsonl": JsonLines,  # first, so that an entry is on disk even if a remote logger fails
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "terminal": Terminal,
}


def check_installed(watch: WatchConfig) -> None:
    """Raise if the package of an enabled logger is not installed."""
    for name, logger in LOGGERS.items():
        if logger.package and logger.enabled(watch) and find_spec(logger.package) is None:
            raise MissingError(
                f"watch.{name} is set, and {logger.package} is not installed",
                hint=f"pip install 'headrace[{name}]'",
            )


def open_loggers(run: LoggedRun) -> list[Logger]:
    """Open each logger that the run's configuration enables."""
    return [logger(run) for logger in LOGGERS.values() if logger.enabled(run.watch)]
