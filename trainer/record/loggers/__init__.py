"""Table of loggers, a file for each; `trainer/record/logger.py` has the interface."""

from __future__ import annotations

from importlib.util import find_spec

from ....console.errors import MissingError
from ..config import WatchConfig
from ..logger import LoggedRun, Logger
from .jsonl import JsonLines
from .mirror import StoreMirror
from .mlflow import MLflow
from .tensorboard import TensorBoard
from .terminal import Terminal
from .wandb import WeightsAndBiases

LOGGERS: dict[str, type[Logger]] = {
    "jsonl": JsonLines,  # first, so that an entry is on disk even if a remote logger fails
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "mirror": StoreMirror,
    "terminal": Terminal,
}


def check_loggers(watch: WatchConfig) -> None:
    """Raise if an enabled logger lacks its package or its credentials."""
    for name, logger in LOGGERS.items():
        if not logger.enabled(watch):
            continue
        if logger.package and not _installed(logger.package):
            raise MissingError(
                f"watch.{name} is set, and {logger.package} is not installed",
                hint=f"pip install 'headrace[{name}]'",
            )
        logger.check(watch)


def _installed(package: str) -> bool:
    """Return whether a package has code: `find_spec` also finds a folder `wandb/` that a run left
    behind."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


def open_loggers(run: LoggedRun) -> list[Logger]:
    """Open the loggers that the run's configuration enables."""
    return [logger(run) for logger in LOGGERS.values() if logger.enabled(run.watch)]
