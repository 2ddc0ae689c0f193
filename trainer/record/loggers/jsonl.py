"""JSON lines in the run's folder: metrics, ledger, evaluations, events and losses of documents.

Signals that few steps record go to signals.jsonl, which keeps their many columns short."""

from __future__ import annotations

from ....dataplane.runlog.writer import LineWriter
from ...loop.metrics import signal_keys
from ...loop.synthetic import SyntheticPlan
from ..logger import Entry, LoggedRun, Logger


class JsonLines(Logger):
    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self.metrics = LineWriter(run.folder.metrics)
        self.ledger = LineWriter(run.folder.ledger)
        self.events = LineWriter(run.folder.events)
        self.evaluations = LineWriter(run.folder.evaluations)
        self.signals = LineWriter(run.folder.signals) if run.watch.signals else None
        has_documents = not isinstance(run.plan, SyntheticPlan)
        self.pieces = LineWriter(run.folder.documents) if has_documents else None
        writers = (
            self.metrics,
            self.ledger,
            self.events,
            self.evaluations,
            self.signals,
            self.pieces,
        )
        self._writers = [writer for writer in writers if writer is not None]

    def step(self, metrics: Entry, ledger: Entry) -> None:
        keys = signal_keys()
        self.metrics.write({key: metrics[key] for key in metrics if key not in keys})
        values = {key: metrics[key] for key in metrics if key in keys}
        if values and self.signals is not None:
            self.signals.write({"step": metrics["step"], "tokens": metrics["tokens"], **values})
        self.ledger.write(ledger)

    def documents(self, entry: Entry) -> None:
        if self.pieces is not None:
            self.pieces.write(entry)

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
