"""Levels of detail of a run's curves, kept in files.

    entries   0 1 2 3 4 5 6 7 | 8 …          one for each line: 4 bytes
    level 1   min max mean count | …         for each 8 entries: 16 bytes
    level 2   min max mean count | …         for each 64 entries
    …         up to 8^6

A window of any width is read from the finest level that has few more buckets than the page has
pixels, so a window of a million steps costs as much as one of a thousand. Lines are only appended,
except that a resume cuts a file back: each line's checksum shows up to which line the files are
still true, and the rest is read again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...console.errors import IntegrityError
from ...dataplane.arrays import Float64
from ...dataplane.runlog.writer import entry_of
from ...dataplane.storage import storage
from .columns import columns, missing_value, valid_bytes

Float32 = npt.NDArray[np.float32]

VERSION = 1
FACTOR = 8
LEVELS = 6
CHUNK = 8 << 20
"""Bytes of lines that are read at once."""
BUCKET = np.dtype([("low", "<f4"), ("high", "<f4"), ("mean", "<f4"), ("count", "<f4")])
AXES = ("step", "tokens", "hours", "at", "sum")
"""Columns in 8 bytes, without levels: three axes, and place and checksum of the line."""
INDEX = "index.json"
LOCK = "lock"


@dataclass(frozen=True)
class Index:
    """The lines that the files of a folder hold."""

    version: int = VERSION
    entries: int = 0
    offset: int = 0
    """Bytes of these lines."""
    series: dict[str, int] = field(default_factory=dict)
    """Number of each curve's files."""


@dataclass(frozen=True, eq=False)
class Window:
    """Curves of a window, in at most as many buckets as were asked for."""

    x: Float64
    """Middle of each bucket on the axis."""
    first: Float64
    """First step of each bucket."""
    last: Float64
    curves: dict[str, tuple[Float32, Float32, Float32]]
    """Mean, least and greatest value of each bucket, NaN where no line has one."""


class Levels:
    """The curves of one file of lines."""

    def __init__(self, file: str, folder: Path, chunk_bytes: int = CHUNK) -> None:
        self.file, self.chunk_bytes = file, chunk_bytes
        self.folder = folder
        self.size = 0
        """Bytes of the file when it was last looked at."""
        self.index = self._stored()

    def refresh(self) -> Iterator[None]:
        """Read the lines that are new, a part at a time. If another process does it already, see
        what it has read."""
        if not storage.exists(self.file):  # the run may have been deleted: make no folder in it
            self.index, self.size = Index(), 0
            return
        if not (self.folder / INDEX).exists():
            self.index = Index()
        with self._writing() as ours:
            if not ours:
                self.index = self._stored()
                return
            self.size = storage.size(self.file)
            self._forget_changed()
            while self.index.offset < self.size and self._read_more():
                yield

    def axis(self, name: str) -> Float64:
        """Return the axis of all entries, mapped."""
        return self._mapped(name, self.index.entries)

    def window(
        self, names: Sequence[str], axis: str, low: float, high: float, width: int
    ) -> Window:
        """Return curves between two values of an axis, with one bucket beyond each end."""
        index, x = self.index, self.axis(axis)
        first = max(0, int(np.searchsorted(x, low, "left")) - 1)
        last = min(len(x), int(np.searchsorted(x, high, "right")) + 1)
        level = 0
        while level < LEVELS and (last - first) // FACTOR ** (level + 1) >= width:
            level += 1
        size = FACTOR**level
        buckets = range(first // size, -(-last // size))
        group = max(1, -(-len(buckets) // width))
        begin = buckets.start // group * group
        stop = min(-(-buckets.stop // group) * group, -(-index.entries // size))
        starts = np.arange(begin, stop, group) * size
        ends = np.minimum(starts + group * size, index.entries)
        steps = self._mapped("step", index.entries)
        curves = {
            name: _grouped(self._buckets(index, name, level, begin, stop), group)
            for name in names
            if name in index.series
        }
        return Window(x[(starts + ends - 1) // 2], steps[starts], steps[ends - 1], curves)

    def values(self, name: str, first: int, last: int) -> Float32:
        """Return a curve's values of single entries."""
        file = self._path(self.index.series[name], 0)
        return np.fromfile(file, "<f4", last - first, offset=4 * first)

    def entry(self, step: int) -> int | None:
        """Return the number of a step's entry."""
        steps = self.axis("step")
        place = int(np.searchsorted(steps, step))
        return place if place < len(steps) and steps[place] == step else None

    def line(self, entry: int) -> dict[str, Any] | None:
        """Return an entry's line; None if the file has changed since it was read."""
        at, sums = self.axis("at"), self.axis("sum")
        end = int(at[entry + 1]) if entry + 1 < len(at) else self.index.offset
        line = storage.read(self.file, int(at[entry]), end)
        return entry_of(line) if zlib.crc32(line) == sums[entry] else None

    def _read_more(self) -> bool:
        """Read a part of the new lines; False if none of them is whole."""
        index = self.index
        end = min(self.size, index.offset + self.chunk_bytes)
        data = storage.read(self.file, index.offset, end)
        while (length := data.rfind(b"\n") + 1) == 0 and end < self.size:  # a very long line
            begin, end = end, min(self.size, end + self.chunk_bytes)
            data += storage.read(self.file, begin, end)
        if length == 0:
            return False
        try:
            found, sizes, sums = columns(data[:length], self.file)
        except IntegrityError:
            length = valid_bytes(data[:length])
            if not length:
                number = index.entries + 1
                what = f"line {number:,} of {self.file} is invalid: the curves end before it"
                raise IntegrityError(what) from None
            found, sizes, sums = columns(data[:length], self.file)
        count = len(sizes)
        found["at"] = index.offset + np.cumsum(sizes) - sizes
        found["sum"] = sums
        before = float(self._mapped("hours", index.entries)[-1]) if index.entries else 0.0
        seconds = np.nan_to_num(found.get("seconds", np.zeros(count)))
        found["hours"] = before + np.cumsum(seconds) / 3600
        self.folder.mkdir(parents=True, exist_ok=True)
        if lacking := [name for name in AXES if name not in found]:
            raise IntegrityError(f"{self.file} has lines without {' and '.join(lacking)}")
        for name in AXES:
            _put(self.folder / name, index.entries, found.pop(name).astype("<f8"))
        series = dict(index.series)
        for name in found:
            series.setdefault(name, len(series))
        for name, number in series.items():
            values = found.get(name, np.full(count, missing_value(name)))
            self._append(number, index, name, values)
        self._store(Index(VERSION, index.entries + count, index.offset + length, series))
        return True

    def _append(self, number: int, index: Index, name: str, values: Float64) -> None:
        """Append the values of a curve to all its levels."""
        start = index.entries if name in index.series else 0
        fill = np.full(
            index.entries - start, missing_value(name)
        )  # lines before the curve's first one
        below: Any = np.concatenate([fill, values]).astype("<f4")
        _put(self._path(number, 0), start, below)
        for level in range(1, LEVELS + 1):
            file, part = self._path(number, level - 1), start % FACTOR
            start -= part
            if part:  # the bucket that has begun
                below = np.concatenate([np.fromfile(file, below.dtype, part,
                                        offset=start * below.itemsize), below])  # fmt: skip
            below, start = _bucketed(below, FACTOR), start // FACTOR
            _put(self._path(number, level), start, below)

    def _buckets(self, index: Index, name: str, level: int, first: int, last: int) -> Any:
        """Return buckets of a level; entries count as buckets of one value."""
        file = self._path(index.series[name], level)
        kind = np.dtype("<f4") if level == 0 else BUCKET
        read = np.fromfile(file, kind, last - first, offset=first * kind.itemsize)
        return read if level else _single(read)

    def _forget_changed(self) -> None:
        """Forget the entries from the first line on that is no longer in the file."""
        known, index = 0, self.index
        if not index.entries or self._same(index.entries - 1):
            return
        unknown = index.entries - 1
        while known < unknown:
            middle = (known + unknown) // 2
            if self._same(middle):
                known = middle + 1
            else:
                unknown = middle
        offset = int(self.axis("at")[known])
        self._store(replace(index, entries=known, offset=offset) if known else Index())

    def _same(self, entry: int) -> bool:
        at = self.axis("at")
        end = int(at[entry + 1]) if entry + 1 < len(at) else self.index.offset
        if end > self.size:
            return False
        line = storage.read(self.file, int(at[entry]), end)
        return bool(zlib.crc32(line) == self.axis("sum")[entry])

    def _path(self, number: int, level: int) -> Path:
        return self.folder / f"{number}.{level}"

    def _mapped(self, name: str, count: int) -> Float64:
        if not count:
            return np.empty(0)
        return np.memmap(self.folder / name, "<f8", "r", shape=(count,))

    def _stored(self) -> Index:
        try:
            data = json.loads((self.folder / INDEX).read_bytes())
            return Index(**data) if data["version"] == VERSION else Index()
        except (OSError, ValueError, TypeError, KeyError):
            return Index()

    def _store(self, index: Index) -> None:
        storage.write(str(self.folder / INDEX), json.dumps(asdict(index)).encode())
        self.index = index

    @contextlib.contextmanager
    def _writing(self) -> Iterator[bool]:
        """Hold the folder's lock; yield False if another process holds it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True


def _put(file: Path, place: int, values: Any) -> None:
    """Write values at a place of a file. It never becomes shorter: a thread may have mapped it."""
    with file.open("r+b" if file.exists() else "w+b") as opened:
        opened.seek(place * values.itemsize)
        opened.write(values.tobytes())


def _single(values: Any) -> Any:
    buckets = np.empty(len(values), BUCKET)
    buckets["low"] = buckets["high"] = buckets["mean"] = values
    buckets["count"] = np.isfinite(values)
    return buckets


def _bucketed(values: Any, size: int) -> Any:
    """Join so many neighbouring values, or buckets, to one bucket each."""
    below = values if values.dtype == BUCKET else _single(values)
    count = -(-len(below) // size)
    padded = np.zeros(count * size, BUCKET)
    for name in ("low", "high", "mean"):
        padded[name] = np.nan
    padded[: len(below)] = below
    rows = padded.reshape(count, size)
    joined = np.empty(count, BUCKET)
    joined["low"] = np.fmin.reduce(rows["low"], axis=1)
    joined["high"] = np.fmax.reduce(rows["high"], axis=1)
    counts = rows["count"].astype(np.float64)
    sums = np.where(counts > 0, rows["mean"].astype(np.float64), 0.0) * counts
    total = counts.sum(axis=1)
    joined["count"] = total
    joined["mean"] = np.divide(sums.sum(axis=1), total, out=np.full(count, np.nan), where=total > 0)
    return joined


def _grouped(buckets: Any, group: int) -> tuple[Float32, Float32, Float32]:
    joined = buckets if group == 1 else _bucketed(buckets, group)
    return tuple(np.ascontiguousarray(joined[name]) for name in ("mean", "low", "high"))  # type: ignore[return-value]
