"""Table of loggers. One file each; see `trainer/record/logger.py` for the interface."""

from __future__ import annotations

from ..logger import LoggedRun, Logger
from .jsonl import JsonLines
from .mlflow import MLflow
from .tensorboard import TensorBoard
from .terminal import Terminal
from .wandb import WeightsAndBiases

LOGGERS: dict[str, type[Logger]] = {
    "jsonl": JsonLines,  # first: what others fail on is on disk by then
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "terminal": Terminal,
}


def open_loggers(run: LoggedRun) -> list[Logger]:
    """Open each logger that the run's configuration enables."""
    return [logger(run) for logger in LOGGERS.values() if logger.enabled(run.watch)]
