"""Lines on stderr: some steps, all evaluations, and how long the start took."""

from __future__ import annotations

import time
from typing import Any

from ....console.progress import format_bytes, format_duration, format_number
from ..logger import Entry, LoggedRun, Logger, evaluation_losses
from ..stragglers import BEGINS, ENDS


class Terminal(Logger):
    """Shows a phase's first step, the run's last one, skipped steps, and a step every
    `watch.log_seconds`."""

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self.shown_at = 0.0
        """Time of the last shown step."""
        self.mean_speed: float | None = None
        """Running mean in tokens per second."""
        self.phase = ""

    def step(self, metrics: Entry, ledger: Entry) -> None:
        speed = metrics["tokens_per_second"]
        mean_speed = self.mean_speed
        self.mean_speed = speed if mean_speed is None else 0.8 * mean_speed + 0.2 * speed
        edge = metrics["phase"] != self.phase or metrics["step"] + 1 == self.run.plan.end_step
        now = time.monotonic()
        recent = now - self.shown_at < self.run.watch.log_seconds
        if recent and not edge and not metrics.get("skipped", False):
            return
        self.shown_at, self.phase = now, metrics["phase"]
        self._write_line("  ".join(self._format_step(metrics)))

    def evaluation(self, entry: Entry) -> None:
        losses = (f"{source} {loss:.4f}" for source, loss in evaluation_losses(entry).items())
        self._write_line(f"{self._format_position(entry)}  held out  {'  '.join(losses)}")

    def event(self, entry: Entry) -> None:
        if entry["event"] == "first step":
            self._write_line(
                f"the first step ended {format_duration(entry['seconds'])} after the start"
            )
        elif entry["event"] in (BEGINS, ENDS):
            self._write_line(entry["what"])

    def _format_step(self, metrics: Entry) -> list[str]:
        loss = metrics["loss"]
        remaining = self.run.plan.end_token - metrics["tokens"]
        speed = max(self.mean_speed or 0.0, 0.1)  # the entry's speed is rounded to 0.1
        return [
            self._format_position(metrics),
            f"{metrics['phase']}",
            f"loss {loss:.4f}" if loss is not None else "loss not finite",
            f"lr {metrics['lr']:.2e}",
            f"{format_number(speed)} tok/s",
            *([f"mfu {metrics['mfu']:.1%}"] if metrics["mfu"] is not None else []),
            *([f"hfu {metrics['hfu']:.1%}"] if metrics["hfu"] is not None else []),
            *([format_bytes(metrics["memory"])] if metrics["memory"] else []),
            *([f"data {metrics['data_wait']:.0%}"] if metrics["data_wait"] >= 0.01 else []),
            f"{format_duration(remaining / speed)} left" if remaining > 0 else "done",
            *([f"skipped: {metrics['why']}"] if metrics.get("skipped", False) else []),
            *([f"back to step {metrics['back_to']}"] if "back_to" in metrics else []),
        ]

    def _format_position(self, entry: dict[str, Any]) -> str:
        """Format the step's number, as in the ledger, the report and `mixtures audit`, and the
        progress through the plan, rounded down: 100% only after the last step."""
        plan = self.run.plan
        done = entry["tokens"] - plan.end_token + plan.tokens
        width = len(str(plan.end_step - 1))
        return f"step {entry['step']:>{width}} {1000 * done // plan.tokens / 1000:>6.1%}"

    def _write_line(self, line: str) -> None:
        self.run.stream.write(f"{line}\n")
        self.run.stream.flush()
