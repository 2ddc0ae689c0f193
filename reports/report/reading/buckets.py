"""Curves in buckets: mean, least and greatest value of neighbouring lines, as the page draws them.

A file of few lines has a bucket for each. Of a long one, the first buckets are smaller, so that the
start of a run stays visible on a logarithmic axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....dataplane.arrays import Float64
from ....trainer.loop.metrics import metric_of
from .chunks import Chunk

Float32 = npt.NDArray[np.float32]

EARLY = 8
"""One of so many buckets is for the start of a logarithmic axis."""
AXES = ("step", "row", "tokens")
"""Columns that are no curve."""
READ = ("rows", "noise_steps")
"""Metrics without a panel from which a report computes others."""


@dataclass(frozen=True, eq=False)
class Table:
    """Curves over the same buckets."""

    step: Float64
    """Step in the middle of each bucket."""
    tokens: Float64
    hours: Float64
    first: Float64
    """First step of each bucket."""
    last: Float64
    curves: dict[str, tuple[Float32, Float32, Float32]]
    """Mean, least and greatest value of each bucket, NaN where no line has one."""

    def mean(self, name: str) -> Float32:
        found = self.curves.get(name)
        return np.full(len(self.step), np.nan, np.float32) if found is None else found[0]


def is_drawn(column: str) -> bool:
    """Return True if a report draws a column, or needs it for another curve."""
    metric = metric_of(column)
    unseen = metric is not None and metric.title is None
    return column not in AXES and (not unseen or column.split("/")[0] in READ)


class Buckets:
    """Takes the chunks of a file in order."""

    def __init__(self, lines: int, most: int) -> None:
        self.starts = _starts(lines, most)
        self.ends = np.append(self.starts[1:], lines)
        self.places = {
            "step": (self.starts + self.ends - 1) // 2,
            "tokens": (self.starts + self.ends - 1) // 2,
            "hours": (self.starts + self.ends - 1) // 2,
            "first": self.starts,
            "last": self.ends - 1,
        }
        self.axes = {name: np.zeros(len(self.starts)) for name in self.places}
        self.sums: dict[str, Float64] = {}
        self.counts: dict[str, Float64] = {}
        self.lows: dict[str, Float64] = {}
        self.highs: dict[str, Float64] = {}
        self.seconds = 0.0

    def add(self, chunk: Chunk) -> None:
        hours = (self.seconds + np.cumsum(np.nan_to_num(chunk["seconds"]))) / 3600
        self.seconds = float(hours[-1]) * 3600
        axes = {"step": chunk["step"], "tokens": chunk["tokens"], "hours": hours}
        for name, places in self.places.items():
            begin, end = np.searchsorted(places, (chunk.first, chunk.first + len(chunk)))
            values = axes.get(name, chunk["step"])
            self.axes[name][begin:end] = values[places[begin:end] - chunk.first]
        lines = np.arange(chunk.first, chunk.first + len(chunk))
        buckets = np.searchsorted(self.starts, lines, "right") - 1
        begins = np.flatnonzero(np.diff(buckets, prepend=-1))
        for name, values in chunk.columns.items():
            if is_drawn(name):
                self._take(name, values, buckets, begins)

    def _take(
        self,
        name: str,
        values: Float64,
        buckets: npt.NDArray[np.int64],
        begins: npt.NDArray[np.int64],
    ) -> None:
        if name not in self.sums:
            size = len(self.starts)
            self.sums[name], self.counts[name] = np.zeros(size), np.zeros(size)
            self.lows[name], self.highs[name] = np.full((2, size), np.nan)
        known = np.isfinite(values)
        own = buckets[begins]
        self.sums[name][own] += np.add.reduceat(np.where(known, values, 0.0), begins)
        self.counts[name][own] += np.add.reduceat(known.astype(np.float64), begins)
        seen = np.where(known, values, np.nan)
        self.lows[name][own] = np.fmin(self.lows[name][own], np.fmin.reduceat(seen, begins))
        self.highs[name][own] = np.fmax(self.highs[name][own], np.fmax.reduceat(seen, begins))

    def table(self) -> Table:
        curves = {}
        for name, total in self.sums.items():
            counts = self.counts[name]
            if not counts.any():
                continue
            mean = np.divide(total, counts, out=np.full(len(total), np.nan), where=counts > 0)
            found = (mean, self.lows[name], self.highs[name])
            curves[name] = tuple(each.astype(np.float32) for each in found)
        return Table(**self.axes, curves=curves)  # type: ignore[arg-type]


def _starts(lines: int, most: int) -> npt.NDArray[np.int64]:
    """Return the first line of each bucket."""
    if lines <= most:
        return np.arange(lines)
    even = np.linspace(0, lines, most, endpoint=False)
    early = np.geomspace(1, lines, most // EARLY) - 1
    starts: npt.NDArray[np.int64] = np.unique(np.concatenate([even, early[:-1]]).astype(np.int64))
    return starts
