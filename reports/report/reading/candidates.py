"""Find candidates for outlier steps: losses far above the losses before."""

from __future__ import annotations

import numpy as np

from ....dataplane.arrays import Float64
from ....trainer.loop.guard import robust_center
from .chunks import LineChunk

WINDOW = 100
"""Steps before, with which a loss is compared."""
DEVIATIONS = 6.0
"""Deviations by which an outlier exceeds the window's median; it exceeds the maximum too."""
MIN_DISTANCE = 10
"""Steps between outliers; nearer ones are the same event."""
MAX_OUTLIERS = 10
"""Rows in the table; metrics.jsonl has all steps."""


class OutlierCandidates:
    """Collects outlier candidates from a file's chunks, which are added in order. Skipped steps are
    not among them."""

    def __init__(self) -> None:
        self.candidates: list[tuple[float, int, int]] = []
        """Deviations, number among the applied steps, and offset in the file."""
        self._num_applied = 0
        self._windows: dict[str, Float64] = {}

    def add(self, chunk: LineChunk) -> None:
        applied = np.flatnonzero(np.isfinite(chunk["loss"]) & ~(chunk["skipped"] == 1))
        highest = np.zeros(len(applied))
        for name in chunk.columns:
            if name == "loss" or name.startswith("loss/"):  # the mean hides a source of few rows
                values = chunk[name][applied]
                known = np.flatnonzero(np.isfinite(values))
                highest[known] = np.maximum(highest[known], self._deviations(name, values[known]))
        for number in np.flatnonzero(highest > DEVIATIONS).tolist():
            offset = int(chunk.offsets[applied[number]])
            self.candidates.append((float(highest[number]), self._num_applied + number, offset))
        self._num_applied += len(applied)

    def largest(self) -> list[tuple[float, int, int]]:
        """Return the largest candidates that lie MIN_DISTANCE apart, ordered by step: deviations,
        number among the applied steps, and offset."""
        outliers: list[tuple[float, int, int]] = []
        for candidate in sorted(self.candidates, reverse=True):
            distances = (abs(candidate[1] - outlier[1]) for outlier in outliers)
            if len(outliers) < MAX_OUTLIERS and all(steps >= MIN_DISTANCE for steps in distances):
                outliers.append(candidate)
        return sorted(outliers, key=lambda outlier: outlier[1])

    def _deviations(self, name: str, losses: Float64) -> Float64:
        """Return by how many deviations each loss exceeds the preceding window's median; 0 if the
        window has a loss as high."""
        earlier = self._windows.get(name, np.empty(0))
        history = np.concatenate([earlier, losses])
        self._windows[name] = history[-WINDOW:]
        padded = np.concatenate([np.full(WINDOW, np.nan), history])
        windows = np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[len(earlier) : -1]
        maxima = np.fmax.reduce(windows, axis=1)
        num_before = len(earlier) + np.arange(len(losses))
        exceeding = (losses > maxima) & (num_before >= WINDOW // 4)
        deviations = np.zeros(len(losses))
        for number in np.flatnonzero(exceeding).tolist():
            middle, deviation = robust_center(windows[number][-num_before[number] :].tolist())
            deviations[number] = (losses[number] - middle) / deviation
        return deviations
