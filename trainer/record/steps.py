"""Entries of what a run does: each is made once, on rank 0, and handed to every logger."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING

from ...console.errors import StorageError
from ...dataplane.order.timeline import PhaseRows, PlanStep
from ...dataplane.runlog.ledger import LedgerEntry
from ..loop.batches import RunPlan
from ..loop.hooks.hook import Hook, StepRecord
from ..loop.metrics import format_record
from .logger import Entry, Logger
from .noise_scale import NoiseScale
from .speed import Speed
from .stragglers import Stragglers

if TYPE_CHECKING:
    from ..checkpoints.store import RunState
    from ..loop.evaluate import Evaluation
    from ..loop.guard import SkippedStep
    from ..loop.signals import Layers
    from ..loop.step_stats import StepStats


class NullRecorder(Hook):
    """No-op recorder of every rank but the first."""

    def event(self, kind: str, step: int, **details: object) -> None:
        pass


GROWN = 1.05
"""Growth of a rank's memory that is recorded again."""


class RunRecorder(Hook):
    """Recorder of rank 0."""

    def __init__(
        self,
        plan: RunPlan,
        loggers: Sequence[Logger],
        speed: Speed,
        *,
        stragglers: Stragglers | None = None,
        noise: NoiseScale | None = None,
        asked: float | None = None,
    ) -> None:
        """`stragglers` compares the ranks, if they are timed. `asked` is the time at which a person
        asked for this start, on this machine's monotonic clock."""
        self.plan = plan
        self.loggers = loggers
        self.speed = speed
        self.stragglers = stragglers
        self.noise = noise or NoiseScale()
        self.asked = asked
        self.memory: Sequence[int] = ()
        """Bytes of each rank in the last event `memory`."""

    def event(self, kind: str, step: int, **details: object) -> None:
        entry = event(kind, step, **details)
        for logger in self.loggers:
            logger.event(entry)

    def step_done(self, record: StepRecord) -> None:
        step, stats = record.step, record.stats
        speed = step.rows * step.phase.seq_len / record.seconds
        left_out = _left_out(record.skipped)
        combined = dict(stats.metrics)
        memory = [int(size) for size in combined.get("memory", ())]
        own_seconds = combined.pop("own_seconds", ())
        slowest = None
        if self.stragglers is not None and own_seconds:
            slowest = self.stragglers.step(own_seconds, record.seconds, step.phase.seq_len)
        values: Entry = {
            **combined,
            "loss": stats.loss,
            "lr": record.lr,
            "grad_norm": record.update.grad_norm,
            "tokens_per_second": speed,
            "mfu": self.speed.mfu(step.phase.seq_len, speed),
            "hfu": self.speed.hfu(step.phase.seq_len, speed),
            "memory": memory[0] if memory else 0,
            "data_wait": combined.get("data_wait", 0.0) / record.seconds,
            "seconds": record.seconds,
            "sources": by_source([source.name for source in self.plan.sources], stats),
            **({} if slowest is None else slowest.entry()),
            **by_layer(record.layers),
            **({} if record.noise is None else self.noise.add(record.noise)),
        }
        if record.layers and own_seconds:
            values["own_seconds"] = own_seconds
        metrics: Entry = {
            "step": step.number,
            "row": step.end_row,
            "tokens": step.end_token,
            "phase": step.phase.name,
            **format_record(values),
            **left_out,
        }
        entry = LedgerEntry(step.number, step.first_row, step.rows, record.ledger)
        for logger in self.loggers:
            logger.step(metrics, {**asdict(entry), **left_out})
        if record.skipped is not None:
            what, where = record.skipped.message(self.plan, step, stats)
            self.event(record.skipped.kind, step.number, what=what, where=where, **left_out)
        if slowest is not None and self.stragglers is not None:
            for kind, rank, what in self.stragglers.changes(step.number):
                self.event(kind, step.number, rank=rank, what=what)
        if self.asked is not None:
            waited, self.asked = time.monotonic() - self.asked, None
            self.event("first step", step.number, seconds=round(waited, 2))
        both = zip_longest(memory, self.memory, fillvalue=0)
        if any(now > GROWN * before for now, before in both):
            self.memory = memory
            self.event("memory", step.number, memory=memory)

    def evaluated(self, step: PlanStep[PhaseRows], evaluation: Evaluation) -> None:
        """Record an evaluation after `step`."""
        entry: Entry = {
            "step": step.number,
            "tokens": step.end_token,
            "phase": step.phase.name,
            "loss": finite(evaluation.stats.loss),
            "seconds": round(evaluation.seconds, 3),
            "sources": by_source(evaluation.names, evaluation.stats),
        }
        for logger in self.loggers:
            logger.evaluation(entry)

    def sealed(self, step: int, blocked: float, error: Exception | None) -> None:
        """Record a checkpoint that was sealed, or the error of its save."""
        if error is None:
            self.event("checkpoint", step, blocked=round(blocked, 4))
            return
        with contextlib.suppress(StorageError):  # a full disk may have caused the failure
            self.event("checkpoint failed", step, error=str(error))

    def save_begins(self) -> None:
        for logger in self.loggers:
            logger.sync()

    def ended(self, state: RunState, *, finished: bool) -> None:
        self.event("finish" if finished else "stop", state.step, ledger=state.ledger)

    def failed(self, step: int, error: Exception) -> None:
        self.event("fail", step, error=str(error))

    def close(self) -> None:
        for logger in self.loggers:
            logger.close()


def event(kind: str, step: int, **details: object) -> Entry:
    """Return an entry of events.jsonl."""
    return {"time": time.time(), "event": kind, "step": step, **details}


def by_source(names: Sequence[str], stats: StepStats) -> dict[str, Entry]:
    """Return the loss, the loss weights and the rows of each source that gave rows."""
    numbers = zip(names, stats.losses, stats.weights, stats.rows, strict=True)
    return {
        name: {"loss": finite(loss / weight) if weight else None, "weight": weight, "rows": rows}
        for name, loss, weight, rows in numbers
        if rows
    }


def by_layer(layers: Layers) -> Entry:
    """Return the signals of each layer, under the key `layers`; nothing if the step has none."""
    found = {
        layer: {name: finite(value) for name, value in own.items()} for layer, own in layers.items()
    }
    return {"layers": found} if found else {}


def finite(value: float) -> float | None:
    """Return None for infinities and NaN, which JSON cannot write."""
    return value if value - value == 0 else None


def _left_out(skipped: SkippedStep | None) -> Entry:
    """Return the fields that mark a step whose update was not applied."""
    if skipped is None:
        return {}
    back = {} if skipped.back_to is None else {"back_to": skipped.back_to}
    return {"skipped": True, "why": skipped.kind, **back}
