"""What a run writes down of each step: metrics, the ledger, TensorBoard, the terminal's line."""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from ..console.errors import MissingError
from ..console.progress import duration, human
from ..dataplane import ledger
from .config import WatchConfig
from .lines import LineWriter
from .schedule import Plan

if TYPE_CHECKING:
    from .loop import StepRecord

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
TENSORBOARD = "tensorboard"


class Silent:
    """Every rank but the first."""

    def record(self, record: StepRecord) -> None:
        pass

    def saved(self, step: int, blocked: float) -> None:
        pass


@dataclass(frozen=True)
class Speed:
    """What MFU is measured by."""

    flops_per_token: dict[int, float]
    """Of training, by sequence length."""
    peak: float | None
    """Of all devices together."""

    def mfu(self, seq_len: int, tokens_per_second: float) -> float | None:
        if self.peak is None:
            return None
        return self.flops_per_token[seq_len] * tokens_per_second / self.peak


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
        stream: TextIO | None = None,
    ) -> None:
        self.plan = plan
        self.speed = speed
        self.watch = watch
        self.metrics = LineWriter(folder / METRICS)
        self.ledger = LineWriter(folder / ledger.NAME)
        self.events = LineWriter(folder / EVENTS)
        self.board = _tensorboard(folder / TENSORBOARD, first_step) if watch.tensorboard else None
        self.wandb = _wandb(watch.wandb, folder) if watch.wandb else None
        self.stream = stream or sys.stderr
        self.end = plan.phases[-1].first_token + plan.phases[-1].tokens
        self.shown = 0.0
        self.pace: float | None = None
        self.phase = ""

    def event(self, kind: str, step: int, **details: Any) -> None:
        self.events.write({"time": time.time(), "event": kind, "step": step, **details})

    def record(self, record: StepRecord) -> None:
        step, facts = record.step, record.facts
        tokens = step.rows * step.phase.seq_len
        speed = tokens / record.seconds
        self.pace = speed if self.pace is None else 0.8 * self.pace + 0.2 * speed
        entry: dict[str, Any] = {
            "step": step.number,
            "row": step.first_row + step.rows,
            "tokens": step.first_token + tokens,
            "phase": step.phase.name,
            "loss": _number(facts.loss),
            "lr": record.lr,
            "grad_norm": _number(record.update.grad_norm),
            "tokens_per_second": round(speed, 1),
            "mfu": self.speed.mfu(step.phase.seq_len, speed),
            "data_wait": round(facts.data_wait / record.seconds, 6),
            "seconds": round(record.seconds, 6),
            "sources": {
                source.name: {
                    "loss": _number(loss / weight) if weight else None,
                    "weight": weight,
                    "rows": rows,
                }
                for source, loss, weight, rows in zip(
                    self.plan.sources, facts.losses, facts.weights, facts.rows, strict=True
                )
                if rows
            },
        }
        if not record.update.applied:
            entry["skipped"] = True
        self.metrics.write(entry)
        self.ledger.write(
            {
                "step": step.number,
                "first_row": step.first_row,
                "rows": step.rows,
                "hash": record.ledger,
            }
        )
        charts = _charts(entry)
        if self.board is not None:
            for name, value in charts.items():
                self.board.add_scalar(name, value, step.number)
        if self.wandb is not None:
            self.wandb.log(charts, step=step.number)
        self._show(entry)

    def saved(self, step: int, blocked: float) -> None:
        self.event("checkpoint", step, blocked=round(blocked, 4))

    def close(self) -> None:
        for writer in (self.metrics, self.ledger, self.events):
            writer.close()
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()

    def _show(self, entry: dict[str, Any]) -> None:
        edge = entry["phase"] != self.phase or entry["step"] + 1 == self.plan.last_step
        now = time.monotonic()
        if not edge and now - self.shown < self.watch.log_seconds:
            return
        self.shown, self.phase = now, entry["phase"]
        assert self.pace is not None
        left = (self.end - entry["tokens"]) / self.pace
        width = len(str(self.plan.last_step))
        loss = entry["loss"]
        parts = [
            f"step {entry['step'] + 1:>{width}} of {self.plan.last_step}",
            f"{entry['phase']}",
            f"loss {loss:.4f}" if loss is not None else "loss not finite",
            f"lr {entry['lr']:.2e}",
            f"{human(self.pace)} tok/s",
            *([f"mfu {entry['mfu']:.1%}"] if entry["mfu"] is not None else []),
            f"data {entry['data_wait']:.1%}",
            f"{duration(left)} left" if left > 0 else "done",
        ]
        if entry.get("skipped"):
            parts.append("skipped: gradients not finite")
        self.stream.write("  ".join(parts) + "\n")
        self.stream.flush()


def _charts(entry: dict[str, Any]) -> dict[str, float]:
    """A step's metrics as charts name them; what is not a number is left out."""
    values = {
        "loss/all": entry["loss"],
        "optimizer/lr": entry["lr"],
        "optimizer/grad_norm": entry["grad_norm"],
        "speed/tokens_per_second": entry["tokens_per_second"],
        "speed/mfu": entry["mfu"],
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
            "watch.wandb is set, and wandb is not installed", mend="pip install 'headrace[wandb]'"
        ) from None
    name = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    return wandb.init(project=project, name=folder.name, id=name, resume="allow", dir=str(folder))
