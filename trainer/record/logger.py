"""Interface of a logger: one destination of what a run records.

    RunRecorder ── entry of a step, an evaluation, an event ──► every logger of the table

To add one, write `loggers/NAME.py`, add a line to `loggers/__init__.py`, and give it a field of
`WatchConfig` if a person is to choose it.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, TextIO

from ..folders.folder import RunFolder
from ..loop.batches import RunPlan
from ..loop.metrics import METRICS
from .config import WatchConfig

Entry = dict[str, Any]
"""A JSON object; docs/trainer.md names its fields."""


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """The run that loggers are opened for."""

    folder: RunFolder
    plan: RunPlan
    watch: WatchConfig
    first_step: int
    """Step at which this start begins: a run that was killed may have logged later ones."""
    stream: TextIO
    """The terminal."""

    @property
    def id(self) -> str:
        """Name of the run's folder in a remote store, where each start continues the same page."""
        return hashlib.sha256(str(self.folder.root.resolve()).encode()).hexdigest()[:16]


class Logger:
    """One destination. A subclass overrides the methods whose entries it writes.

    Rank 0 opens each enabled logger once per start and calls it in the order in which things
    happen.
    """

    package: ClassVar[str | None] = None
    """Package that the logger imports. headrace's extra by the logger's name installs it."""

    def __init__(self, run: LoggedRun) -> None:
        self.run = run

    @classmethod
    def enabled(cls, watch: WatchConfig) -> bool:
        """True if the configuration asks for this logger."""
        return True

    @classmethod
    def check(cls, watch: WatchConfig) -> None:
        """Raise if the destination cannot be reached as configured, such as without credentials."""

    def step(self, metrics: Entry, ledger: Entry) -> None:
        """Log a step: its metrics, and its entry of the ledger."""

    def evaluation(self, entry: Entry) -> None:
        """Log the losses on held-out rows after a step."""

    def event(self, entry: Entry) -> None:
        """Log a start, a resume, a sealed checkpoint, a skipped step or the end of the run."""

    def sync(self) -> None:
        """Make everything logged so far durable: a checkpoint is about to be saved."""

    def close(self) -> None:
        """Write what is buffered, and release the destination."""


class ScalarLogger(Logger, ABC):
    """Logger of curves: it receives named numbers of a step."""

    @abstractmethod
    def scalars(self, values: dict[str, float], step: int) -> None: ...

    def step(self, metrics: Entry, ledger: Entry) -> None:
        self.scalars(step_scalars(metrics), metrics["step"])

    def evaluation(self, entry: Entry) -> None:
        losses = evaluation_losses(entry)
        self.scalars({f"evaluation/{name}": loss for name, loss in losses.items()}, entry["step"])


def step_scalars(metrics: Entry) -> dict[str, float]:
    """Return a step's metrics by the names of their curves, without missing values."""
    values = {
        **{line.logger: metrics.get(name) for name, line in METRICS.items() if line.logger},
        "stream/tokens": metrics["tokens"],
        **{f"loss/{name}": source["loss"] for name, source in metrics["sources"].items()},
        **{
            f"{kind}/{layer}": norm
            for layer, norms in metrics.get("layers", {}).items()
            for kind, norm in norms.items()
        },
    }
    return {name: value for name, value in values.items() if value is not None}


def evaluation_losses(entry: Entry) -> dict[str, float]:
    """Return the held-out losses of all sources together (`all`) and of each source."""
    losses = {"all": entry["loss"]}
    losses |= {name: source["loss"] for name, source in entry["sources"].items()}
    return {name: loss for name, loss in losses.items() if loss is not None}
