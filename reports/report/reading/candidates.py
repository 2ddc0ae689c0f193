"""Candidates of outlier steps: losses far above the losses before them."""

from __future__ import annotations

import numpy as np

from ....dataplane.arrays import Float64
from ....trainer.loop.guard import usual
from .chunks import Chunk

WINDOW = 100
"""Steps that a loss is compared with."""
DEVIATIONS = 6.0
"""An outlier is above the window's maximum, and above its median by more than this many
deviations."""
APART = 10
"""Outliers nearer to each other than this many steps are one event."""
MOST = 10
"""Rows of the table; metrics.jsonl has all steps."""


class Candidates:
    """Steps above the losses before them, found in the chunks of a file in order. Skipped steps
    have a table of their own."""

    def __init__(self) -> None:
        self.found: list[tuple[float, int, int]] = []
        """Deviations, number among the applied steps, and place in the file."""
        self._applied = 0
        self._windows: dict[str, Float64] = {}

    def add(self, chunk: Chunk) -> None:
        applied = np.flatnonzero(np.isfinite(chunk["loss"]) & ~(chunk["skipped"] == 1))
        highest = np.zeros(len(applied))
        for name in chunk.columns:
            if name == "loss" or name.startswith("loss/"):  # the mean hides a source of few rows
                values = chunk[name][applied]
                known = np.flatnonzero(np.isfinite(values))
                highest[known] = np.maximum(highest[known], self._deviations(name, values[known]))
        for number in np.flatnonzero(highest > DEVIATIONS).tolist():
            place = int(chunk.places[applied[number]])
            self.found.append((float(highest[number]), self._applied + number, place))
        self._applied += len(applied)

    def largest(self) -> list[tuple[float, int, int]]:
        """Return the largest candidates that are apart from each other, in order."""
        kept: list[tuple[float, int, int]] = []
        for candidate in sorted(self.found, reverse=True):
            if len(kept) < MOST and all(abs(candidate[1] - other[1]) >= APART for other in kept):
                kept.append(candidate)
        return sorted(kept, key=lambda candidate: candidate[1])

    def _deviations(self, name: str, losses: Float64) -> Float64:
        """Return how many deviations each loss is above the median of the window before it; 0 if
        the window has a loss as high."""
        earlier = self._windows.get(name, np.empty(0))
        line = np.concatenate([earlier, losses])
        self._windows[name] = line[-WINDOW:]
        padded = np.concatenate([np.full(WINDOW, np.nan), line])
        windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[len(earlier) : -1]
        most = np.fmax.reduce(windows, axis=1)
        seen = len(earlier) + np.arange(len(losses))
        above = (losses > most) & (seen >= WINDOW // 4)
        found = np.zeros(len(losses))
        for number in np.flatnonzero(above).tolist():
            middle, deviation = usual(windows[number][-seen[number] :].tolist())
            found[number] = (losses[number] - middle) / deviation
        return found
