"""JSON lines in the run's folder: metrics, ledger, evaluations and events. Every run has them."""

from __future__ import annotations

from ....dataplane.runlog.writer import LineWriter
from ..logger import Entry, LoggedRun, Logger


class JsonLines(Logger):
    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self.metrics = LineWriter(run.folder.metrics)
        self.ledger = LineWriter(run.folder.ledger)
        self.events = LineWriter(run.folder.events)
        self.evaluations = LineWriter(run.folder.evaluations)
        self._writers = (self.metrics, self.ledger, self.events, self.evaluations)

    def step(self, metrics: Entry, ledger: Entry) -> None:
        self.metrics.write(metrics)
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
