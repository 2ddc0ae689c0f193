"""What a run writes down of each step: metrics, the ledger, TensorBoard, the terminal's line."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ...console.errors import MissingError
from ...console.progress import as_bytes, duration, human
from ...dataplane.order.timeline import PhaseRows, Step
from ...dataplane.runlog import ledger
from ...dataplane.runlog.reader import METRICS
from ...dataplane.runlog.writer import LineWriter
from ..folder import EVALUATIONS, EVENTS, TENSORBOARD
from ..loop.batches import Plan
from .config import WatchConfig

if TYPE_CHECKING:
    from ..loop.evaluate import Evaluation
    from ..loop.guard import SkippedStep
    from ..loop.loop import StepRecord
    from ..loop.step_stats import StepStats


class Silent:
    """Every rank but the first."""

    def record(self, record: StepRecord) -> None:
        pass

    def evaluated(self, step: Step[PhaseRows], found: Evaluation) -> None:
        pass

    def saved(self, step: int, blocked: float) -> None:
        pass


@dataclass(frozen=True)
class Speed:
    """What MFU and HFU are measured by."""

    flops_per_token: dict[int, float]
    """That training takes, by sequence length."""
    done_per_token: dict[int, float]
    """That are done: what backward computes again counts as well."""
    peak: float | None
    """Of all devices together."""

    def mfu(self, seq_len: int, tokens_per_second: float) -> float | None:
        return self._share(self.flops_per_token[seq_len], tokens_per_second)

    def hfu(self, seq_len: int, tokens_per_second: float) -> float | None:
        return self._share(self.done_per_token[seq_len], tokens_per_second)

    def _share(self, flops: float, tokens_per_second: float) -> float | None:
        return None if self.peak is None else flops * tokens_per_second / self.peak


class Records:
    """Rank 0's: files in the run's folder, and a line on stderr now and then."""

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        speed: Speed,
        watch: WatchConfig,
        *,
        first_step: int,
        began: float | None = None,
        memory: Callable[[], int] = lambda: 0,
        stream: TextIO | None = None,
    ) -> None:
        """`began` is when this start of the run was asked for."""
        self.plan = plan
        self.memory = memory
        self.began = began
        self.speed = speed
        self.watch = watch
        self.metrics = LineWriter(folder / METRICS)
        self.ledger = LineWriter(folder / ledger.NAME)
        self.events = LineWriter(folder / EVENTS)
        self.evaluations = LineWriter(folder / EVALUATIONS)
        self.board = _tensorboard(folder / TENSORBOARD, first_step) if watch.tensorboard else None
        self.wandb = _wandb(watch.wandb, folder) if watch.wandb else None
        self.stream = stream or sys.stderr
        self.end = plan.last_token
        self.shown = 0.0
        self.pace: float | None = None
        self.phase = ""

    def event(self, kind: str, step: int, **details: Any) -> None:
        self.events.write(event(kind, step, **details))

    def record(self, record: StepRecord) -> None:
        step, stats = record.step, record.stats
        tokens = step.rows * step.phase.seq_len
        speed = tokens / record.seconds
        self.pace = speed if self.pace is None else 0.8 * self.pace + 0.2 * speed
        entry: dict[str, Any] = {
            "step": step.number,
            "row": step.last_row,
            "tokens": step.last_token,
            "phase": step.phase.name,
            "loss": _number(stats.loss),
            "lr": record.lr,
            "grad_norm": _number(record.update.grad_norm),
            "tokens_per_second": round(speed, 1),
            "mfu": self.speed.mfu(step.phase.seq_len, speed),
            "hfu": self.speed.hfu(step.phase.seq_len, speed),
            "memory": self.memory(),
            "data_wait": round(stats.data_wait / record.seconds, 6),
            "seconds": round(record.seconds, 6),
            "sources": _by_source([source.name for source in self.plan.sources], stats),
        }
        left_out = _left_out(record.skipped)
        entry |= left_out
        self.metrics.write(entry)
        self.ledger.write(
            {
                "step": step.number,
                "first_row": step.first_row,
                "rows": step.rows,
                "hash": record.ledger,
                **left_out,
            }
        )
        if record.skipped is not None:
            what, where = record.skipped.message(self.plan, step, stats)
            self.event(record.skipped.kind, step.number, what=what, where=where, **left_out)
        self._chart(_charts(entry), step.number)
        self._show(entry)
        if self.began is not None:
            waited, self.began = time.time() - self.began, None
            self.event("first step", step.number, seconds=round(waited, 2))
            self._say(f"the first step has ended {duration(waited)} after the start")

    def evaluated(self, step: Step[PhaseRows], found: Evaluation) -> None:
        """After a step, whose number and tokens it gets."""
        by_source = _by_source(found.names, found.stats)
        entry = {
            "step": step.number,
            "tokens": step.last_token,
            "phase": step.phase.name,
            "loss": _number(found.stats.loss),
            "seconds": round(found.seconds, 3),
            "sources": by_source,
        }
        self.evaluations.write(entry)
        losses = {"all": entry["loss"], **{name: e["loss"] for name, e in by_source.items()}}
        known = {name: value for name, value in losses.items() if value is not None}
        self._chart({f"evaluation/{name}": value for name, value in known.items()}, step.number)
        parts = "  ".join(f"{name} {value:.4f}" for name, value in known.items())
        self._say(f"{self._place(entry)}  held out  {parts}")

    def saved(self, step: int, blocked: float) -> None:
        self.event("checkpoint", step, blocked=round(blocked, 4))

    def close(self) -> None:
        for writer in (self.metrics, self.ledger, self.events, self.evaluations):
            writer.close()
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()

    def _show(self, entry: dict[str, Any]) -> None:
        harmed = entry.get("skipped", False)
        edge = entry["phase"] != self.phase or entry["step"] + 1 == self.plan.last_step
        now = time.monotonic()
        if not edge and not harmed and now - self.shown < self.watch.log_seconds:
            return
        self.shown, self.phase = now, entry["phase"]
        assert self.pace is not None
        left = (self.end - entry["tokens"]) / self.pace
        loss = entry["loss"]
        parts = [
            self._place(entry),
            f"{entry['phase']}",
            f"loss {loss:.4f}" if loss is not None else "loss not finite",
            f"lr {entry['lr']:.2e}",
            f"{human(self.pace)} tok/s",
            *([f"mfu {entry['mfu']:.1%}"] if entry["mfu"] is not None else []),
            *([f"hfu {entry['hfu']:.1%}"] if entry["hfu"] is not None else []),
            *([as_bytes(entry["memory"])] if entry["memory"] else []),
            *([f"data {entry['data_wait']:.0%}"] if entry["data_wait"] >= 0.01 else []),
            f"{duration(left)} left" if left > 0 else "done",
            *([f"skipped: {entry['why']}"] if harmed else []),
            *([f"back to step {entry['back_to']}"] if "back_to" in entry else []),
        ]
        self._say("  ".join(parts))

    def _place(self, entry: dict[str, Any]) -> str:
        """The step by the number that the ledger, the report and `mixtures audit` know it by; and
        how much is done with it, never 100% before all is."""
        taken = entry["tokens"] - self.end + self.plan.tokens
        width = len(str(self.plan.last_step - 1))
        return f"step {entry['step']:>{width}} {1000 * taken // self.plan.tokens / 1000:>6.1%}"

    def _say(self, line: str) -> None:
        self.stream.write(f"{line}\n")
        self.stream.flush()

    def _chart(self, charts: dict[str, float], step: int) -> None:
        if self.board is not None:
            for name, value in charts.items():
                self.board.add_scalar(name, value, step)
        if self.wandb is not None:
            self.wandb.log(charts, step=step)


def event(kind: str, step: int, **details: Any) -> dict[str, Any]:
    """An entry of what happened to a run."""
    return {"time": time.time(), "event": kind, "step": step, **details}


def _by_source(names: Sequence[str], stats: StepStats) -> dict[str, dict[str, Any]]:
    """What each source that gave rows came to."""
    numbers = zip(names, stats.losses, stats.weights, stats.rows, strict=True)
    return {
        name: {"loss": _number(loss / weight) if weight else None, "weight": weight, "rows": rows}
        for name, loss, weight, rows in numbers
        if rows
    }


def _left_out(skipped: SkippedStep | None) -> dict[str, Any]:
    """What the ledger says of a step that is not in the weights."""
    if skipped is None:
        return {}
    back = {} if skipped.back_to is None else {"back_to": skipped.back_to}
    return {"skipped": True, "why": skipped.kind, **back}


def _charts(entry: dict[str, Any]) -> dict[str, float]:
    """A step's metrics as charts name them; what is not a number is left out."""
    values = {
        "loss/all": entry["loss"],
        "optimizer/lr": entry["lr"],
        "optimizer/grad_norm": entry["grad_norm"],
        "speed/tokens_per_second": entry["tokens_per_second"],
        "speed/mfu": entry["mfu"],
        "speed/hfu": entry["hfu"],
        "speed/memory": entry["memory"],
        "speed/data_wait": entry["data_wait"],
        "stream/tokens": entry["tokens"],
        **{f"loss/{name}": each["loss"] for name, each in entry["sources"].items()},
    }
    return {name: value for name, value in values.items() if value is not None}


def _number(value: float) -> float | None:
    """JSON has no word for what is not finite."""
    return value if value - value == 0 else None


def _tensorboard(folder: Path, first_step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:  # a machine with torch alone
        return None
    return SummaryWriter(str(folder), purge_step=first_step)


def _wandb(project: str, folder: Path) -> Any:
    """The run's page: one for a folder, gone on with by every start."""
    try:
        import wandb
    except ImportError:
        raise MissingError(
            "watch.wandb is set, and wandb is not installed", hint="pip install 'headrace[wandb]'"
        ) from None
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return wandb.init(project=project, name=folder.name, id=name, resume="allow", dir=str(folder))
