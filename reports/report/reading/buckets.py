"""Reduce curves to buckets: mean, minimum and maximum over neighbouring lines.

A short file has a bucket for each line. In a long file, the first buckets are smaller, so that a
run's start stays visible on a logarithmic axis.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ....dataplane.arrays import Float64
from ....trainer.loop.metrics import find_metric
from .chunks import LineChunk

Float32 = npt.NDArray[np.float32]

LOGARITHMIC = 8
"""Every so many buckets, one is spaced for a logarithmic axis."""
AXES = ("step", "row", "tokens")
"""Columns that are axes, not curves."""
COMPUTED_FROM = ("rows", "noise_steps")
"""Metrics without a panel from which a report computes curves."""


@dataclass(frozen=True, eq=False)
class CurveTable:
    """Curves over the same buckets. All arrays have a value for each bucket."""

    step: Float64
    """Step in the middle of the bucket."""
    tokens: Float64
    hours: Float64
    first: Float64
    """First step."""
    last: Float64
    """Last step."""
    curves: dict[str, tuple[Float32, Float32, Float32]]
    """Mean, minimum and maximum by curve; NaN where no line has a value."""

    def mean(self, name: str) -> Float32:
        curve = self.curves.get(name)
        return np.full(len(self.step), np.nan, np.float32) if curve is None else curve[0]


def is_drawn(column: str) -> bool:
    """Return whether a report draws a column, or computes a curve from it."""
    metric = find_metric(column)
    has_no_panel = metric is not None and metric.title is None
    return column not in AXES and (not has_no_panel or column.split("/")[0] in COMPUTED_FROM)


class CurveBuckets:
    """Reduces a file's chunks, which are added in order."""

    def __init__(self, num_lines: int, max_buckets: int) -> None:
        self.starts = _bucket_starts(num_lines, max_buckets)
        self.ends = np.append(self.starts[1:], num_lines)
        middles = (self.starts + self.ends - 1) // 2
        self.axis_lines = {
            "step": middles,
            "tokens": middles,
            "hours": middles,
            "first": self.starts,
            "last": self.ends - 1,
        }
        self.axes = {name: np.zeros(len(self.starts)) for name in self.axis_lines}
        self.sums: dict[str, Float64] = {}
        self.counts: dict[str, Float64] = {}
        self.lows: dict[str, Float64] = {}
        self.highs: dict[str, Float64] = {}
        self.seconds = 0.0

    def add(self, chunk: LineChunk) -> None:
        hours = (self.seconds + np.cumsum(np.nan_to_num(chunk["seconds"]))) / 3600
        self.seconds = float(hours[-1]) * 3600
        axes = {"step": chunk["step"], "tokens": chunk["tokens"], "hours": hours}
        for name, lines in self.axis_lines.items():
            begin, end = np.searchsorted(lines, (chunk.first, chunk.first + len(chunk)))
            values = axes.get(name, chunk["step"])
            self.axes[name][begin:end] = values[lines[begin:end] - chunk.first]
        chunk_lines = np.arange(chunk.first, chunk.first + len(chunk))
        bucket_of_line = np.searchsorted(self.starts, chunk_lines, "right") - 1
        begins = np.flatnonzero(np.diff(bucket_of_line, prepend=-1))
        for name, values in chunk.columns.items():
            if is_drawn(name):
                self._reduce(name, values, bucket_of_line[begins], begins)

    def _reduce(
        self,
        name: str,
        values: Float64,
        buckets: npt.NDArray[np.int64],
        begins: npt.NDArray[np.int64],
    ) -> None:
        """Add values to `buckets`, whose lines begin at `begins`."""
        if name not in self.sums:
            size = len(self.starts)
            self.sums[name], self.counts[name] = np.zeros(size), np.zeros(size)
            self.lows[name], self.highs[name] = np.full((2, size), np.nan)
        known = np.isfinite(values)
        self.sums[name][buckets] += np.add.reduceat(np.where(known, values, 0.0), begins)
        self.counts[name][buckets] += np.add.reduceat(known.astype(np.float64), begins)
        finite = np.where(known, values, np.nan)
        lows, highs = self.lows[name], self.highs[name]
        lows[buckets] = np.fmin(lows[buckets], np.fmin.reduceat(finite, begins))
        highs[buckets] = np.fmax(highs[buckets], np.fmax.reduceat(finite, begins))

    def table(self) -> CurveTable:
        curves = {}
        for name, total in self.sums.items():
            counts = self.counts[name]
            if not counts.any():
                continue
            mean = np.divide(total, counts, out=np.full(len(total), np.nan), where=counts > 0)
            curve = (mean, self.lows[name], self.highs[name])
            curves[name] = tuple(values.astype(np.float32) for values in curve)
        return CurveTable(**self.axes, curves=curves)  # type: ignore[arg-type]


def _bucket_starts(num_lines: int, max_buckets: int) -> npt.NDArray[np.int64]:
    """Return the number of each bucket's first line."""
    if num_lines <= max_buckets:
        return np.arange(num_lines)
    even = np.linspace(0, num_lines, max_buckets, endpoint=False)
    logarithmic = np.geomspace(1, num_lines, max_buckets // LOGARITHMIC) - 1
    starts: npt.NDArray[np.int64] = np.unique(
        np.concatenate([even, logarithmic[:-1]]).astype(np.int64)
    )
    return starts
