"""Exact totals of a run, summed in float64 over all of its lines, a chunk at a time."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from .chunks import Chunk

TAIL = 50
"""Last lines that are kept."""
STRIPS = 160
"""Columns of the realised shares over tokens."""


class Totals:
    """Takes the chunks of metrics.jsonl in order."""

    def __init__(
        self,
        steps: int,
        sources: Sequence[str],
        phases: Sequence[int],
        cold: Iterable[int],
        marked: Iterable[int],
    ) -> None:
        """`phases` are the first steps of the phases; `cold` are steps that begin a start, which
        are slower; the tokens before `marked` steps are kept."""
        self.steps = steps
        self.sources = sources
        self.phases = np.array(phases)
        self.cold = np.array(sorted(cold), np.float64)
        self.before_marked = np.array(sorted(marked), np.float64) - 1
        self.seconds = self.waited = 0.0
        self.warm_seconds = self.warm_tokens = self.all_tokens = 0.0
        self.memory = 0.0
        self.skipped: list[int] = []
        self.tokens_after: dict[int, float] = {}
        """Tokens after some steps."""
        self.group = max(1, -(-steps // STRIPS))
        self.rows = np.zeros((len(phases), len(sources)))
        """Rows taken in each phase from each source."""
        self.strips = np.zeros((-(-steps // self.group), len(sources)))
        self.strip_ends = np.zeros(len(self.strips))
        self.utilisation = {"mfu": (0.0, 0), "hfu": (0.0, 0)}
        self._tail: list[bytes] = []

    def add(self, chunk: Chunk) -> None:
        steps, tokens, seconds = chunk["step"], chunk["tokens"], chunk["seconds"]
        spent = chunk["tokens_per_second"] * seconds
        warm = ~np.isin(steps, self.cold)
        self.seconds += float(np.nansum(seconds))
        self.waited += float(np.nansum(chunk["data_wait"] * seconds))
        self.all_tokens += float(np.nansum(spent))
        self.warm_tokens += float(np.nansum(spent[warm]))
        self.warm_seconds += float(np.nansum(seconds[warm]))
        self.memory = max(self.memory, float(np.nan_to_num(chunk["memory"]).max()))
        self.skipped += steps[chunk["skipped"] == 1].astype(int).tolist()
        wanted = np.isin(steps, self.before_marked)
        self.tokens_after |= dict(zip(steps[wanted].astype(int).tolist(), tokens[wanted].tolist(),
                                      strict=True))  # fmt: skip
        for name, (total, count) in self.utilisation.items():
            known = chunk[name][np.isfinite(chunk[name])]
            self.utilisation[name] = (total + float(known.sum()), count + len(known))
        taken = np.stack(
            [np.nan_to_num(chunk[f"rows/{name}"]) for name in self.sources], axis=1
        ) if self.sources else np.zeros((len(chunk), 0))  # fmt: skip
        np.add.at(self.rows, np.searchsorted(self.phases, steps, "right") - 1, taken)
        strips = np.arange(chunk.first, chunk.first + len(chunk)) // self.group
        np.add.at(self.strips, strips, taken)
        self.strip_ends[strips] = tokens  # the last line of a strip stays
        self._tail = (self._tail + chunk.lines.splitlines()[-TAIL:])[-TAIL:]

    @property
    def last(self) -> list[dict[str, Any]]:
        """Last tenth of the steps, at most TAIL: one step alone is noise."""
        count = max(1, min(TAIL, self.steps // 10))
        return [json.loads(line) for line in self._tail[-count:]]

    @property
    def tokens_per_second(self) -> float:
        """Mean speed without the first step of each start."""
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
