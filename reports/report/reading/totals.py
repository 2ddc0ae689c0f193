"""Sum a run's lines in float64, chunk by chunk, into exact totals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .chunks import LineChunk

TAIL = 50
"""Last lines that stay in memory, at most."""
STRIPS = 160
"""Columns in the chart of realised shares over tokens."""


class Totals:
    """Sums the chunks of metrics.jsonl, which are added in order."""

    def __init__(
        self,
        num_steps: int,
        sources: Sequence[str],
        phase_starts: Sequence[int],
        cold_steps: Iterable[int],
        marked_steps: Iterable[int],
    ) -> None:
        """`cold_steps` are the first steps after a start, which are slower. `tokens_after` has the
        steps before `marked_steps`."""
        self.steps = num_steps
        self.sources = sources
        self.phase_starts = np.array(phase_starts)
        self.cold_steps = np.array(sorted(cold_steps), np.float64)
        self.steps_before_marked = np.array(sorted(marked_steps), np.float64) - 1
        self.seconds = self.waited = 0.0
        self.warm_seconds = self.warm_tokens = self.all_tokens = 0.0
        self.memory = 0.0
        self.skipped: list[int] = []
        self.tokens_after: dict[int, float] = {}
        """Tokens after the steps before marked ones."""
        self.steps_per_strip = max(1, -(-num_steps // STRIPS))
        self.rows = np.zeros((len(phase_starts), len(sources)))
        """Rows taken [phase, source]."""
        self.strips = np.zeros((-(-num_steps // self.steps_per_strip), len(sources)))
        """Rows taken [strip, source]."""
        self.strip_ends = np.zeros(len(self.strips))
        self.utilisation = {"mfu": (0.0, 0), "hfu": (0.0, 0)}
        self._tail: list[bytes] = []

    def add(self, chunk: LineChunk) -> None:
        steps, tokens, seconds = chunk["step"], chunk["tokens"], chunk["seconds"]
        step_tokens = chunk["tokens_per_second"] * seconds
        warm = ~np.isin(steps, self.cold_steps)
        self.seconds += float(np.nansum(seconds))
        self.waited += float(np.nansum(chunk["data_wait"] * seconds))
        self.all_tokens += float(np.nansum(step_tokens))
        self.warm_tokens += float(np.nansum(step_tokens[warm]))
        self.warm_seconds += float(np.nansum(seconds[warm]))
        self.memory = max(self.memory, float(np.nan_to_num(chunk["memory"]).max()))
        self.skipped += steps[chunk["skipped"] == 1].astype(int).tolist()
        before_marked = np.isin(steps, self.steps_before_marked)
        marked = zip(steps[before_marked].astype(int), tokens[before_marked], strict=True)
        self.tokens_after |= {int(step): float(tokens_after) for step, tokens_after in marked}
        for name, (total, count) in self.utilisation.items():
            known = chunk[name][np.isfinite(chunk[name])]
            self.utilisation[name] = (total + float(known.sum()), count + len(known))
        rows = np.zeros((len(chunk), len(self.sources)))
        for number, source in enumerate(self.sources):
            rows[:, number] = np.nan_to_num(chunk[f"rows/{source}"])
        np.add.at(self.rows, np.searchsorted(self.phase_starts, steps, "right") - 1, rows)
        strips = np.arange(chunk.first, chunk.first + len(chunk)) // self.steps_per_strip
        np.add.at(self.strips, strips, rows)
        self.strip_ends[strips] = tokens  # the strip's last line wins
        self._tail = (self._tail + chunk.lines.splitlines()[-TAIL:])[-TAIL:]

    @property
    def last(self) -> list[dict[str, Any]]:
        """Last tenth of the steps, at most TAIL: a single step is noise."""
        count = max(1, min(TAIL, self.steps // 10))
        return [json.loads(line) for line in self._tail[-count:]]

    @property
    def tokens_per_second(self) -> float:
        """Mean throughput, without the first step after each start."""
        if self.warm_seconds:
            return self.warm_tokens / self.warm_seconds
        return self.all_tokens / self.seconds if self.seconds else 0.0

    @property
    def data_wait(self) -> float:
        return self.waited / self.seconds if self.seconds else 0.0

    def mean(self, name: str) -> float | None:
        """Return the mean of `mfu` or `hfu`; None if no step has it."""
        total, count = self.utilisation[name]
        return total / count if count else None
