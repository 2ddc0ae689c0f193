"""Lines on stderr: a step now and then, each evaluation, and how long the start took."""

from __future__ import annotations

import time
from typing import Any

from ....console.progress import format_bytes, format_duration, format_number
from ..logger import Entry, LoggedRun, Logger, evaluation_losses
from ..stragglers import BEGINS, ENDS


class Terminal(Logger):
    """Shows the first and last step of a phase, skipped steps, and a step every
    `watch.log_seconds`."""

    def __init__(self, run: LoggedRun) -> None:
        super().__init__(run)
        self.shown = 0.0
        """When the last step was shown."""
        self.pace: float | None = None
        """Tokens per second, a running mean."""
        self.phase = ""

    def step(self, metrics: Entry, ledger: Entry) -> None:
        speed = metrics["tokens_per_second"]
        self.pace = speed if self.pace is None else 0.8 * self.pace + 0.2 * speed
        edge = metrics["phase"] != self.phase or metrics["step"] + 1 == self.run.plan.end_step
        now = time.monotonic()
        recent = now - self.shown < self.run.watch.log_seconds
        if recent and not edge and not metrics.get("skipped", False):
            return
        self.shown, self.phase = now, metrics["phase"]
        self._say("  ".join(self._step(metrics)))

    def evaluation(self, entry: Entry) -> None:
        losses = (f"{name} {loss:.4f}" for name, loss in evaluation_losses(entry).items())
        self._say(f"{self._place(entry)}  held out  {'  '.join(losses)}")

    def event(self, entry: Entry) -> None:
        if entry["event"] == "first step":
            self._say(f"the first step ended {format_duration(entry['seconds'])} after the start")
        elif entry["event"] in (BEGINS, ENDS):
            self._say(entry["what"])

    def _step(self, metrics: Entry) -> list[str]:
        loss = metrics["loss"]
        left = self.run.plan.end_token - metrics["tokens"]
        pace = max(self.pace or 0.0, 0.1)  # the entry's speed is rounded to 0.1
        return [
            self._place(metrics),
            f"{metrics['phase']}",
            f"loss {loss:.4f}" if loss is not None else "loss not finite",
            f"lr {metrics['lr']:.2e}",
            f"{format_number(pace)} tok/s",
            *([f"mfu {metrics['mfu']:.1%}"] if metrics["mfu"] is not None else []),
            *([f"hfu {metrics['hfu']:.1%}"] if metrics["hfu"] is not None else []),
            *([format_bytes(metrics["memory"])] if metrics["memory"] else []),
            *([f"data {metrics['data_wait']:.0%}"] if metrics["data_wait"] >= 0.01 else []),
            f"{format_duration(left / pace)} left" if left > 0 else "done",
            *([f"skipped: {metrics['why']}"] if metrics.get("skipped", False) else []),
            *([f"back to step {metrics['back_to']}"] if "back_to" in metrics else []),
        ]

    def _place(self, entry: dict[str, Any]) -> str:
        """The step's number, as in the ledger, the report and `mixtures audit`, and the part of
        the plan that is done after it: 100% only after the last step."""
        plan = self.run.plan
        done = entry["tokens"] - plan.end_token + plan.tokens
        width = len(str(plan.end_step - 1))
        return f"step {entry['step']:>{width}} {1000 * done // plan.tokens / 1000:>6.1%}"

    def _say(self, line: str) -> None:
        self.run.stream.write(f"{line}\n")
        self.run.stream.flush()
