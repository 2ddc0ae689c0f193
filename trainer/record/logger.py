"""Interface of a logger: a destination for a run's records.

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
    """What loggers know about their run."""

    folder: RunFolder
    plan: RunPlan
    watch: WatchConfig
    first_step: int
    """Step at which this start begins: a run that was killed may have logged later ones."""
    stream: TextIO
    """The terminal."""

    @property
    def id(self) -> str:
        """Identifier for remote loggers: all starts in a folder continue the same page."""
        return hashlib.sha256(str(self.folder.root.resolve()).encode()).hexdigest()[:16]


class Logger:
    """A destination. A subclass overrides the methods for the entries it writes.

    Rank 0 opens all enabled loggers once per start, and calls them in the order of events.
    """

    package: ClassVar[str | None] = None
    """Package that the logger imports; headrace's extra with the logger's name installs it."""

    def __init__(self, run: LoggedRun) -> None:
        self.run = run

    @classmethod
    def enabled(cls, watch: WatchConfig) -> bool:
        """Return whether the configuration enables this logger."""
        return True

    @classmethod
    def check(cls, watch: WatchConfig) -> None:
        """Raise if the destination cannot be reached as configured, for example without
        credentials."""

    def step(self, metrics: Entry, ledger: Entry) -> None:
        """Log a step's metrics and ledger entry."""

    def documents(self, entry: Entry) -> None:
        """Log the losses of a step's documents (dataplane/runlog/document_losses.py)."""

    def evaluation(self, entry: Entry) -> None:
        """Log the losses on held-out rows after a step."""

    def event(self, entry: Entry) -> None:
        """Log a start, a resume, a sealed checkpoint, a skipped step or the run's end."""

    def sync(self) -> None:
        """Make everything logged so far durable: a checkpoint is about to be saved."""

    def close(self) -> None:
        """Write buffered entries and release the destination."""


class ScalarLogger(Logger, ABC):
    """Logger for curves: receives a step's numbers by name."""

    @abstractmethod
    def scalars(self, values: dict[str, float], step: int) -> None: ...

    def step(self, metrics: Entry, ledger: Entry) -> None:
        self.scalars(step_scalars(metrics), metrics["step"])

    def evaluation(self, entry: Entry) -> None:
        losses = evaluation_losses(entry)
        curves = {f"evaluation/{source}": loss for source, loss in losses.items()}
        self.scalars(curves, entry["step"])


def step_scalars(metrics: Entry) -> dict[str, float]:
    """Return a step's metrics by curve, without missing values."""
    curves = {
        **{metric.logger: metrics.get(key) for key, metric in METRICS.items() if metric.logger},
        "stream/tokens": metrics["tokens"],
        **{f"loss/{source}": stats["loss"] for source, stats in metrics["sources"].items()},
        **{
            f"{signal}/{layer}": value
            for layer, signals in metrics.get("layers", {}).items()
            for signal, value in signals.items()
        },
    }
    return {curve: value for curve, value in curves.items() if value is not None}


def evaluation_losses(entry: Entry) -> dict[str, float]:
    """Return held-out losses by source, and the loss over all sources as `all`."""
    losses = {"all": entry["loss"]}
    losses |= {source: stats["loss"] for source, stats in entry["sources"].items()}
    return {source: loss for source, loss in losses.items() if loss is not None}
