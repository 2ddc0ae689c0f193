"""JSON lines in the run's folder: metrics, ledger, evaluations and events. Every run has them.

Signals that few steps record have a file of their own, so that their many columns are short."""

from __future__ import annotations

from ....dataplane.runlog.writer import LineWriter
from ..logger import Entry, LoggedRun, Logger
from ..noise_scale import STATE

SIGNALS = ("layers", "own_seconds", "noise_scale", *STATE)
"""Fields of a step that only watched steps have."""


class JsonLines(Logger):
    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self.metrics = LineWriter(run.folder.metrics)
        self.ledger = LineWriter(run.folder.ledger)
        self.events = LineWriter(run.folder.events)
        self.evaluations = LineWriter(run.folder.evaluations)
        self.signals = LineWriter(run.folder.signals) if run.watch.signals else None
        written = (self.metrics, self.ledger, self.events, self.evaluations, self.signals)
        self._writers = [writer for writer in written if writer is not None]

    def step(self, metrics: Entry, ledger: Entry) -> None:
        signals = {name: metrics[name] for name in SIGNALS if name in metrics}
        self.metrics.write({name: each for name, each in metrics.items() if name not in SIGNALS})
        if signals and self.signals is not None:
            place = {name: metrics[name] for name in ("step", "tokens")}
            self.signals.write(place | signals)
        self.ledger.write(ledger)

    def evaluation(self, entry: Entry) -> None:
        self.evaluations.write(entry)

    def event(self, entry: Entry) -> None:
        self.events.write(entry)

    def sync(self) -> None:
        for writer in self._writers:
            writer.sync()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()
