"""Build a run's log entries, once on rank 0, and pass them to all loggers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from typing import TYPE_CHECKING

from ...console.errors import StorageError
from ...dataplane.order.timeline import PhaseRows, PlanStep
from ...dataplane.runlog.document_losses import encode_step
from ...dataplane.runlog.ledger import DECISION, LedgerEntry
from ..loop.batches import RunPlan
from ..loop.hooks.hook import Hook, StepRecord
from ..loop.metrics import format_record
from .logger import Entry, Logger
from .noise_scale import NoiseScale
from .speed import Speed
from .stragglers import Slowest, Stragglers

if TYPE_CHECKING:
    from ..checkpoints.store import RunState
    from ..loop.evaluate import Evaluation
    from ..loop.guard import SkippedStep
    from ..loop.signals import Layers
    from ..loop.step_stats import StepStats


class NullRecorder(Hook):
    """No-op recorder on all ranks except rank 0."""

    def event(self, kind: str, step: int, **details: object) -> None:
        pass


GROWN = 1.05
"""Growth factor after which a rank's memory is recorded again."""


class RunRecorder(Hook):
    """Recorder on rank 0."""

    def __init__(
        self,
        plan: RunPlan,
        loggers: Sequence[Logger],
        speed: Speed,
        *,
        stragglers: Stragglers | None = None,
        noise: NoiseScale | None = None,
        requested_at: float | None = None,
    ) -> None:
        """`stragglers` is given if ranks are timed. `requested_at` is the time on this machine's
        monotonic clock at which a person requested this start."""
        self.plan = plan
        self.loggers = loggers
        self.speed = speed
        self.stragglers = stragglers
        self.noise = noise or NoiseScale()
        self.requested_at = requested_at
        self.memory: Sequence[int] = ()
        """Bytes by rank in the last event `memory`."""

    def event(self, kind: str, step: int, **details: object) -> None:
        entry = build_event(kind, step, **details)
        for logger in self.loggers:
            logger.event(entry)

    def step_done(self, record: StepRecord) -> None:
        step, stats = record.step, record.stats
        memory = [int(size) for size in stats.metrics.get("memory", ())]
        length = self._model_length(step, stats)
        slowest, compute_seconds = None, stats.metrics.get("own_seconds", ())
        if self.stragglers is not None and compute_seconds:
            slowest = self.stragglers.add_step(compute_seconds, record.seconds, length)
        skip_fields = _skip_fields(record.skipped)
        metrics: Entry = {
            "step": step.number,
            "row": step.end_row,
            "tokens": step.end_token,
            "phase": step.phase.name,
            **format_record(self._compute_values(record, length, slowest)),
            **skip_fields,
        }
        entry = LedgerEntry(step.number, step.first_row, step.rows, record.ledger)
        decision = {DECISION: record.decision} if record.decision else {}
        for logger in self.loggers:
            logger.step(metrics, {**asdict(entry), **skip_fields, **decision})
            if stats.pieces:
                logger.documents(encode_step(step.number, sum(stats.losses), stats.pieces))
        if record.skipped is not None:
            message, where = record.skipped.message(self.plan, step, stats)
            self.event(record.skipped.kind, step.number, what=message, where=where, **skip_fields)
        if slowest is not None and self.stragglers is not None:
            for kind, rank, message in self.stragglers.changes(step.number):
                self.event(kind, step.number, rank=rank, what=message)
        if self.requested_at is not None:
            seconds, self.requested_at = time.monotonic() - self.requested_at, None
            self.event("first step", step.number, seconds=round(seconds, 2))
        pairs = zip_longest(self.memory, memory, fillvalue=0)
        if any(after > GROWN * before for before, after in pairs):
            self.memory = memory
            self.event("memory", step.number, memory=memory)

    def _compute_values(self, record: StepRecord, length: int, slowest: Slowest | None) -> Entry:
        """Return a step's numbers by the names of `loop/metrics.py`. `length` is that of the
        model's rows."""
        step, stats = record.step, record.stats
        combined = dict(stats.metrics)
        memory, compute_seconds = combined.get("memory", ()), combined.pop("own_seconds", ())
        speed = step.rows * step.phase.seq_len / record.seconds
        values: Entry = {
            **combined,
            "loss": stats.loss,
            "lr": record.lr,
            "grad_norm": record.update.grad_norm,
            "tokens_per_second": speed,
            "mfu": self.speed.mfu(length, speed),
            "hfu": self.speed.hfu(length, speed),
            "memory": int(memory[0]) if memory else 0,
            "data_wait": combined.get("data_wait", 0.0) / record.seconds,
            "seconds": record.seconds,
            "sources": source_stats([source.name for source in self.plan.sources], stats),
            **({} if slowest is None else slowest.entry()),
            **layer_signals(record.layers),
            **({} if record.noise is None else self.noise.add(record.noise)),
        }
        if record.layers and compute_seconds:
            values["own_seconds"] = compute_seconds
        return values

    def _model_length(self, step: PlanStep[PhaseRows], stats: StepStats) -> int:
        """Return the tokens of the model's rows in a step."""
        lengths = (length for length, rows in zip(self.plan.lengths, stats.rows) if rows)  # noqa: B905
        return next(lengths, 0) or step.phase.seq_len

    def evaluated(self, step: PlanStep[PhaseRows], evaluation: Evaluation) -> None:
        """Record an evaluation after `step`."""
        entry: Entry = {
            "step": step.number,
            "tokens": step.end_token,
            "phase": step.phase.name,
            "loss": finite(evaluation.stats.loss),
            "seconds": round(evaluation.seconds, 3),
            "sources": source_stats(evaluation.names, evaluation.stats),
        }
        for logger in self.loggers:
            logger.evaluation(entry)

    def sealed(self, step: int, blocked: float, error: Exception | None) -> None:
        """Record a sealed checkpoint, or the error in its save."""
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


def build_event(kind: str, step: int, **details: object) -> Entry:
    """Build an entry for events.jsonl."""
    return {"time": time.time(), "event": kind, "step": step, **details}


def source_stats(names: Sequence[str], stats: StepStats) -> dict[str, Entry]:
    """Return loss, loss weight and rows by source, without sources that gave no rows."""
    columns = zip(names, stats.losses, stats.weights, stats.rows, strict=True)
    return {
        source: {"loss": finite(loss / weight) if weight else None, "weight": weight, "rows": rows}
        for source, loss, weight, rows in columns
        if rows
    }


def layer_signals(layers: Layers) -> Entry:
    """Return signals by layer, under the key `layers`; empty if the step records none."""
    if not layers:
        return {}
    return {
        "layers": {
            layer: {signal: finite(value) for signal, value in signals.items()}
            for layer, signals in layers.items()
        }
    }


def finite(value: float) -> float | None:
    """Return None for infinities and NaN, which JSON cannot write."""
    return value if value - value == 0 else None


def _skip_fields(skipped: SkippedStep | None) -> Entry:
    """Return the fields that mark a step whose update was not applied."""
    if skipped is None:
        return {}
    back = {} if skipped.back_to is None else {"back_to": skipped.back_to}
    return {"skipped": True, "why": skipped.kind, **back}
