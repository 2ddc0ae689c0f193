"""Encode a window's curves for the page, which asks for them at each zoom.

    uint32 length of the head | head: JSON, padded with spaces to a multiple of 8
    for each run and table: x, first, last as float64, then mean, low, high by curve as float32

All numbers are little-endian; a table with an odd number of float32 values is padded to 8 bytes.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...dataplane.arrays import Float64
from ...trainer.loop.metrics import HELD_OUT
from .byte_sizes import BytesPerToken, bits_per_nat
from .levels import FACTOR, Float32, Levels, Window
from .runs import BoardRun

AXES = ("step", "tokens", "hours")
MAX_WIDTH = 4000
MIN_LOG_START = 1e-9
"""A logarithmic axis's start relative to its end, if the window begins at 0."""


def encode_curves(
    runs: Sequence[BoardRun],
    names: Sequence[str],
    axis: str,
    low: float,
    high: float,
    width: int,
    *,
    log: bool = False,
    bits: bool = False,
) -> bytes:
    """Encode curves between `low` and `high` on an axis, in about `width` buckets.

    With `log`, the first buckets are smaller. With `bits`, losses are in bits per byte.
    """
    width = max(1, min(width, MAX_WIDTH))
    metrics = [name for name in names if not name.startswith(HELD_OUT)]
    evaluations = [name.removeprefix(HELD_OUT) for name in names if name.startswith(HELD_OUT)]
    head: list[dict[str, Any]] = []
    chunks: list[bytes] = []
    for run in runs:
        sizes = run.sizes if bits else None
        trained, held_out = (sizes.trained, sizes.held_out) if sizes else ({}, {})
        steps = (_log_window if log else Levels.window)(
            run.metrics, [*metrics, *_weight_curves(trained)], axis, low, high, width
        )
        windows = [("", convert_window(steps, trained))]
        if signals := [name for name in metrics if name in run.signals.index.series]:
            windows.append(("", _sparse_window(run, run.signals, signals, axis, low, high, width)))
        # a source may have been evaluated for the first time since its bytes were measured
        all_measured = sizes is None or run.evaluated <= held_out.keys()
        if evaluations and run.evaluations.index.entries and all_measured:
            evaluation_curves = [*evaluations, *_weight_curves(held_out)]
            window = _sparse_window(run, run.evaluations, evaluation_curves, axis, low, high, width)
            windows.append((HELD_OUT, convert_window(window, held_out)))
        for prefix, window in windows:
            curves = {prefix + name: arrays for name, arrays in window.curves.items()}
            head.append({"run": run.id, "points": len(window.x), "curves": list(curves)})
            chunks += [np.ascontiguousarray(values, "<f8").tobytes() for values in _axes(window)]
            chunks += [
                array.astype("<f4").tobytes() for arrays in curves.values() for array in arrays
            ]
            chunks.append(bytes(-sum(map(len, chunks)) % 8))
    encoded_head = json.dumps(head).encode()
    encoded_head += b" " * (-(len(encoded_head) + 4) % 8)
    return len(encoded_head).to_bytes(4, "little") + encoded_head + b"".join(chunks)


def _weight_curves(sizes: BytesPerToken) -> list[str]:
    """Return the loss-weight curves, which the conversion to bits per byte needs."""
    return [f"weight/{name}" for name in sizes]


def convert_window(window: Window, sizes: BytesPerToken) -> Window:
    """Return a window with losses in bits per byte, without its weight curves.

    A bucket's loss is its mean nats over its mean bytes. Without `sizes` the window stays as it is.
    """
    if not sizes:
        return window
    curves = dict(window.curves)
    zeros = np.zeros(len(window.x))
    weights = {name: curves.pop(f"weight/{name}", (zeros,))[0].astype(np.float64) for name in sizes}
    for name, factors in bits_per_nat(weights, sizes).items():
        if name in curves:
            mean, low, high = ((values * factors).astype(np.float32) for values in curves[name])
            curves[name] = mean, low, high
    return replace(window, curves=curves)


def _log_window(
    levels: Levels, names: Sequence[str], axis: str, low: float, high: float, width: int
) -> Window:
    """Return a window joined from several, each FACTOR times as long as the one before."""
    x = levels.axis(axis)
    if not len(x):
        return levels.window(names, axis, low, high, width)
    last = min(high, float(x[-1]))
    first = max(low, float(x[0]), last * MIN_LOG_START)
    num_windows = max(1, math.ceil(math.log(last / first, FACTOR))) if last > first > 0 else 1
    edges = [low, *(last / FACTOR**power for power in range(num_windows - 1, 0, -1)), high]
    windows = [
        levels.window(names, axis, begin, end, max(1, width // num_windows))
        for begin, end in itertools.pairwise(edges)
    ]
    return _join_windows(levels, axis, windows)


def _join_windows(levels: Levels, axis: str, windows: Sequence[Window]) -> Window:
    """Join neighbouring windows, whose edge buckets overlap.

    Buckets that end inside the window before are dropped. A bucket that only begins there keeps its
    values and steps, and is drawn behind that window's buckets.
    """
    masks, begins, last_step = [], [], -math.inf
    for window in windows:
        masks.append(window.last > last_step)
        begins.append(np.maximum(window.first, last_step + 1))
        last_step = max(last_step, *window.last[-1:]) if len(window.last) else last_step

    def join(arrays: Iterable[Any]) -> Any:
        return np.concatenate([array[mask] for array, mask in zip(arrays, masks, strict=True)])

    def curve(name: str, place: int) -> Float32:
        joined: Float32 = join(window.curves[name][place] for window in windows)
        return joined

    begin, last = join(begins), join(window.last for window in windows)
    steps = levels.axis("step")
    middle = (np.searchsorted(steps, begin) + np.searchsorted(steps, last)) // 2
    return Window(
        np.asarray(levels.axis(axis))[middle],
        join(window.first for window in windows),
        last,
        {name: (curve(name, 0), curve(name, 1), curve(name, 2)) for name in windows[0].curves},
    )


def _axes(window: Window) -> Iterator[Float64]:
    yield window.x
    yield window.first
    yield window.last


def _sparse_window(
    run: BoardRun,
    levels: Levels,
    names: Sequence[str],
    axis: str,
    low: float,
    high: float,
    width: int,
) -> Window:
    """Return a window of evaluations or signals, which only some steps have. Hours come from the
    run's steps."""
    if axis != "hours":
        return levels.window(names, axis, low, high, width)
    steps, hours = run.metrics.axis("step"), run.metrics.axis("hours")
    first, last = (
        float(steps[min(int(np.searchsorted(hours, value)), len(steps) - 1)])
        for value in (low, high)
    )
    window = levels.window(names, "step", first, last, width)
    entries = np.minimum(np.searchsorted(steps, window.x), len(steps) - 1)
    return Window(np.asarray(hours)[entries], window.first, window.last, window.curves)


def nearest_step(
    run: BoardRun, name: str, first: int, last: int, value: float, *, bits: bool = False
) -> int | None:
    """Return the step from `first` to `last` whose value is nearest to `value`, where a person has
    clicked. With `bits`, it is a loss in bits per byte."""
    levels = run.training_levels(name)
    begin, end = levels.entry(first), levels.entry(last)
    if begin is None or end is None or name not in levels.index.series:
        return None
    sizes = run.sizes.trained if bits and run.sizes else {}
    names = [name, *_weight_curves(sizes)]
    window = levels.window(names, "step", first, last, end - begin + 3)  # a bucket beyond each end
    inside = (window.first >= first) & (window.last <= last)
    values = convert_window(window, sizes).curves[name][0]
    distances = np.abs(values - np.float32(value))[inside]
    if not np.isfinite(distances).any():
        return first
    return int(window.first[inside][int(np.nanargmin(distances))])
