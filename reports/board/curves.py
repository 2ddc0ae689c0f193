"""Curves of a window as bytes: what the page asks for at each zoom.

    uint32 length of the head | head: JSON, padded with spaces to a multiple of 8
    for each run and table: x, first, last as float64, then mean, low, high of each curve as float32

All numbers are little-endian; a table whose float32 values end in the middle of 8 bytes is padded.
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
WIDEST = 4000
LEAST = 1e-9
"""Part of a logarithmic axis's end at which it begins, if the window begins at 0."""


def curves(
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
    """Return the curves of a window of an axis, in about `width` buckets each: of one size, or with
    `log` smaller ones at the begin. With `bits`, losses are in bits per byte."""
    width = max(1, min(width, WIDEST))
    metrics = [name for name in names if not name.startswith(HELD_OUT)]
    evaluations = [name.removeprefix(HELD_OUT) for name in names if name.startswith(HELD_OUT)]
    head: list[dict[str, Any]] = []
    parts: list[bytes] = []
    for run in runs:
        sizes = run.sizes if bits else None
        trained, held_out = (sizes.trained, sizes.held_out) if sizes else ({}, {})
        of_steps = (_log_window if log else Levels.window)(
            run.metrics, [*metrics, *_weights(trained)], axis, low, high, width
        )
        windows = [("", in_bits(of_steps, trained))]
        if signals := [name for name in metrics if name in run.signals.index.series]:
            windows.append(("", _sparse(run, run.signals, signals, axis, low, high, width)))
        known = sizes is None or run.evaluated <= held_out.keys()  # not those that began since
        if evaluations and run.evaluations.index.entries and known:
            named = [*evaluations, *_weights(held_out)]
            of_evaluations = _sparse(run, run.evaluations, named, axis, low, high, width)
            windows.append((HELD_OUT, in_bits(of_evaluations, held_out)))
        for prefix, window in windows:
            found = {prefix + name: values for name, values in window.curves.items()}
            head.append({"run": run.id, "points": len(window.x), "curves": list(found)})
            parts += [np.ascontiguousarray(each, "<f8").tobytes() for each in _places(window)]
            parts += [each.astype("<f4").tobytes() for values in found.values() for each in values]
            parts.append(bytes(-sum(map(len, parts)) % 8))
    text = json.dumps(head).encode()
    text += b" " * (-(len(text) + 4) % 8)
    return len(text).to_bytes(4, "little") + text + b"".join(parts)


def _weights(sizes: BytesPerToken) -> list[str]:
    """Return the curves of the sources' loss weights, from which bits per byte follow."""
    return [f"weight/{name}" for name in sizes]


def in_bits(window: Window, sizes: BytesPerToken) -> Window:
    """Return a window with its losses in bits per byte, from bytes per token by source; the same
    without them. The mean of a bucket is that of its nats over that of its bytes."""
    if not sizes:
        return window
    kept = dict(window.curves)
    none = np.zeros(len(window.x))
    weights = {name: kept.pop(f"weight/{name}", (none,))[0].astype(np.float64) for name in sizes}
    for name, factors in bits_per_nat(weights, sizes).items():
        if name in kept:
            mean, low, high = ((values * factors).astype(np.float32) for values in kept[name])
            kept[name] = mean, low, high
    return replace(window, curves=kept)


def _log_window(
    levels: Levels, names: Sequence[str], axis: str, low: float, high: float, width: int
) -> Window:
    """Return windows that are each FACTOR times as long as the one before, as one window."""
    x = levels.axis(axis)
    if not len(x):
        return levels.window(names, axis, low, high, width)
    last = min(high, float(x[-1]))
    first = max(low, float(x[0]), last * LEAST)
    count = max(1, math.ceil(math.log(last / first, FACTOR))) if last > first > 0 else 1
    edges = [low, *(last / FACTOR**power for power in range(count - 1, 0, -1)), high]
    parts = [
        levels.window(names, axis, begin, end, max(1, width // count))
        for begin, end in itertools.pairwise(edges)
    ]
    return _joined(levels, axis, parts)


def _joined(levels: Levels, axis: str, parts: Sequence[Window]) -> Window:
    """Return neighbouring windows as one. A bucket that begins in the window before it stands
    behind the buckets of that window, and keeps its values and its steps."""
    kept, begins, done = [], [], -math.inf
    for part in parts:
        kept.append(part.last > done)
        begins.append(np.maximum(part.first, done + 1))
        done = max(done, *part.last[-1:]) if len(part.last) else done

    def join(arrays: Iterable[Any]) -> Any:
        return np.concatenate([each[new] for each, new in zip(arrays, kept, strict=True)])

    def curve(name: str, place: int) -> Float32:
        joined: Float32 = join(part.curves[name][place] for part in parts)
        return joined

    begin, last = join(begins), join(part.last for part in parts)
    steps = levels.axis("step")
    middle = (np.searchsorted(steps, begin) + np.searchsorted(steps, last)) // 2
    return Window(
        np.asarray(levels.axis(axis))[middle],
        join(part.first for part in parts),
        last,
        {name: (curve(name, 0), curve(name, 1), curve(name, 2)) for name in parts[0].curves},
    )


def _places(window: Window) -> Iterator[Float64]:
    yield window.x
    yield window.first
    yield window.last


def _sparse(
    run: BoardRun,
    levels: Levels,
    names: Sequence[str],
    axis: str,
    low: float,
    high: float,
    width: int,
) -> Window:
    """Return curves of few steps, of evaluations or signals. Their lines have no hours: those of
    the run's steps count."""
    if axis != "hours":
        return levels.window(names, axis, low, high, width)
    steps, hours = run.metrics.axis("step"), run.metrics.axis("hours")
    first, last = (
        float(steps[min(int(np.searchsorted(hours, value)), len(steps) - 1)])
        for value in (low, high)
    )
    window = levels.window(names, "step", first, last, width)
    places = np.minimum(np.searchsorted(steps, window.x), len(steps) - 1)
    return Window(np.asarray(hours)[places], window.first, window.last, window.curves)


def nearest_step(
    run: BoardRun, name: str, first: int, last: int, value: float, *, bits: bool = False
) -> int | None:
    """Return the step from `first` to `last` whose value is nearest to one that was clicked. With
    `bits`, it is a loss in bits per byte."""
    levels = run.levels_of(name)
    begin, end = levels.entry(first), levels.entry(last)
    if begin is None or end is None or name not in levels.index.series:
        return None
    sizes = run.sizes.trained if bits and run.sizes else {}
    names = [name, *_weights(sizes)]
    steps = levels.window(names, "step", first, last, end - begin + 3)  # one beyond each end
    inside = (steps.first >= first) & (steps.last <= last)
    apart = np.abs(in_bits(steps, sizes).curves[name][0] - np.float32(value))[inside]
    if not np.isfinite(apart).any():
        return first
    return int(steps.first[inside][int(np.nanargmin(apart))])
