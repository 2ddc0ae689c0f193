"""Store a run's curves at several resolutions.

    entries   0 1 2 3 4 5 6 7 | 8 …          for each line: 4 bytes
    level 1   min max mean count | …         for each 8 entries: 16 bytes
    level 2   min max mean count | …         for each 64 entries
    …         up to 8^6

A window is read from the finest level that has few more buckets than the page has pixels, so a
window over a million steps costs as much as a window over a thousand. Lines are only appended,
except that a resume truncates a file: checksums tell up to which line the stored curves are valid,
and later lines are read again.
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
from ...dataplane.runlog.writer import decode_line
from ...dataplane.storage import storage
from .columns import columns, missing_value, valid_bytes

Float32 = npt.NDArray[np.float32]

VERSION = 1
FACTOR = 8
LEVELS = 6
CHUNK = 8 << 20
"""Bytes in memory at once."""
BUCKET = np.dtype([("low", "<f4"), ("high", "<f4"), ("mean", "<f4"), ("count", "<f4")])
AXES = ("step", "tokens", "hours", "at", "sum")
"""Columns in 8 bytes, without levels: three axes, and the line's offset and checksum."""
INDEX = "index.json"
LOCK = "lock"


@dataclass(frozen=True)
class Index:
    """The lines that are stored in a folder."""

    version: int = VERSION
    entries: int = 0
    offset: int = 0
    """Offset in the file where these lines end, in bytes."""
    series: dict[str, int] = field(default_factory=dict)
    """File number by curve."""


@dataclass(frozen=True, eq=False)
class Window:
    """Curves in a window, by bucket. All arrays have a value for each bucket."""

    x: Float64
    """The bucket's middle on the axis."""
    first: Float64
    """First step."""
    last: Float64
    """Last step."""
    curves: dict[str, tuple[Float32, Float32, Float32]]
    """Mean, minimum and maximum by curve; NaN where no line has a value."""


class Levels:
    """A file's curves, at all resolutions."""

    def __init__(self, file: str, folder: Path, chunk_bytes: int = CHUNK) -> None:
        self.file, self.chunk_bytes = file, chunk_bytes
        self.folder = folder
        self.size = 0
        """The file's bytes at the last poll."""
        self.index = self._load_index()

    def refresh(self) -> Iterator[None]:
        """Read new lines chunk by chunk; yield after each. If another process is reading them, take
        over its index."""
        if not storage.exists(self.file):  # the run may have been deleted: make no folder in it
            self.index, self.size = Index(), 0
            return
        if not (self.folder / INDEX).exists():
            self.index = Index()
        with self._lock() as is_locked:
            if not is_locked:
                self.index = self._load_index()
                return
            self.size = storage.size(self.file)
            self._truncate_to_valid()
            while self.index.offset < self.size and self._read_chunk():
                yield

    def axis(self, name: str) -> Float64:
        """Return an axis over all entries, memory-mapped."""
        return self._map(name, self.index.entries)

    def window(
        self, names: Sequence[str], axis: str, low: float, high: float, width: int
    ) -> Window:
        """Return curves between `low` and `high` on an axis, in at most about `width` buckets, with
        a bucket beyond each end."""
        index, x = self.index, self.axis(axis)
        first = max(0, int(np.searchsorted(x, low, "left")) - 1)
        end = min(len(x), int(np.searchsorted(x, high, "right")) + 1)
        level = 0
        while level < LEVELS and (end - first) // FACTOR ** (level + 1) >= width:
            level += 1
        bucket_size = FACTOR**level
        buckets = range(first // bucket_size, -(-end // bucket_size))
        group_size = max(1, -(-len(buckets) // width))
        begin = buckets.start // group_size * group_size
        stop = min(-(-buckets.stop // group_size) * group_size, -(-index.entries // bucket_size))
        starts = np.arange(begin, stop, group_size) * bucket_size
        ends = np.minimum(starts + group_size * bucket_size, index.entries)
        steps = self._map("step", index.entries)
        curves = {
            name: _merge_groups(self._read_buckets(index, name, level, begin, stop), group_size)
            for name in names
            if name in index.series
        }
        return Window(x[(starts + ends - 1) // 2], steps[starts], steps[ends - 1], curves)

    def values(self, name: str, first_entry: int, end_entry: int) -> Float32:
        """Return a curve's values [entries]."""
        file = self._path(self.index.series[name], 0)
        return np.fromfile(file, "<f4", end_entry - first_entry, offset=4 * first_entry)

    def entry(self, step: int) -> int | None:
        """Return a step's entry number; None if the step has no line."""
        steps = self.axis("step")
        entry = int(np.searchsorted(steps, step))
        return entry if entry < len(steps) and steps[entry] == step else None

    def line(self, entry: int) -> dict[str, Any] | None:
        """Read an entry's line; None if the file has changed since."""
        line = self._read_line(entry)
        return decode_line(line) if self._is_valid(line, entry) else None

    def _read_chunk(self) -> bool:
        """Read a chunk of new lines; return False if no line is complete."""
        index = self.index
        end = min(self.size, index.offset + self.chunk_bytes)
        data = storage.read(self.file, index.offset, end)
        while (length := data.rfind(b"\n") + 1) == 0 and end < self.size:  # a very long line
            begin, end = end, min(self.size, end + self.chunk_bytes)
            data += storage.read(self.file, begin, end)
        if length == 0:
            return False
        try:
            new_columns, line_sizes, checksums = columns(data[:length], self.file)
        except IntegrityError:
            length = valid_bytes(data[:length])
            if not length:
                number = index.entries + 1
                message = f"line {number:,} of {self.file} is invalid: the curves end before it"
                raise IntegrityError(message) from None
            new_columns, line_sizes, checksums = columns(data[:length], self.file)
        num_lines = len(line_sizes)
        new_columns["at"] = index.offset + np.cumsum(line_sizes) - line_sizes
        new_columns["sum"] = checksums
        hours_before = float(self._map("hours", index.entries)[-1]) if index.entries else 0.0
        seconds = np.nan_to_num(new_columns.get("seconds", np.zeros(num_lines)))
        new_columns["hours"] = hours_before + np.cumsum(seconds) / 3600
        self.folder.mkdir(parents=True, exist_ok=True)
        if lacking := [name for name in AXES if name not in new_columns]:
            raise IntegrityError(f"{self.file} has lines without {' and '.join(lacking)}")
        for name in AXES:
            _write_at(self.folder / name, index.entries, new_columns.pop(name).astype("<f8"))
        series = dict(index.series)
        for name in new_columns:
            series.setdefault(name, len(series))
        for name, number in series.items():
            values = new_columns.get(name, np.full(num_lines, missing_value(name)))
            self._append(number, index, name, values)
        self._store(Index(VERSION, index.entries + num_lines, index.offset + length, series))
        return True

    def _append(self, number: int, index: Index, name: str, values: Float64) -> None:
        """Append a curve's values to all levels. A new curve is filled up from the first line."""
        start = index.entries if name in index.series else 0
        fill = np.full(index.entries - start, missing_value(name))
        finer: Any = np.concatenate([fill, values]).astype("<f4")
        _write_at(self._path(number, 0), start, finer)
        for level in range(1, LEVELS + 1):
            num_open = start % FACTOR  # values in the bucket that is not full yet
            start -= num_open
            if num_open:
                file, offset = self._path(number, level - 1), start * finer.itemsize
                open_bucket = np.fromfile(file, finer.dtype, num_open, offset=offset)
                finer = np.concatenate([open_bucket, finer])
            finer, start = _merge(finer, FACTOR), start // FACTOR
            _write_at(self._path(number, level), start, finer)

    def _read_buckets(self, index: Index, name: str, level: int, first: int, end: int) -> Any:
        """Read a level's buckets; an entry counts as a bucket with a single value."""
        file = self._path(index.series[name], level)
        dtype = np.dtype("<f4") if level == 0 else BUCKET
        values = np.fromfile(file, dtype, end - first, offset=first * dtype.itemsize)
        return values if level else _single_buckets(values)

    def _truncate_to_valid(self) -> None:
        """Drop the entries from the first line that is no longer in the file."""
        index = self.index
        if not index.entries or self._is_in_file(index.entries - 1):
            return
        num_valid, upper_bound = 0, index.entries - 1
        while num_valid < upper_bound:
            middle = (num_valid + upper_bound) // 2
            if self._is_in_file(middle):
                num_valid = middle + 1
            else:
                upper_bound = middle
        offset = int(self.axis("at")[num_valid])
        self._store(replace(index, entries=num_valid, offset=offset) if num_valid else Index())

    def _is_in_file(self, entry: int) -> bool:
        if self._line_end(entry) > self.size:
            return False
        return self._is_valid(self._read_line(entry), entry)

    def _line_end(self, entry: int) -> int:
        offsets = self.axis("at")
        return int(offsets[entry + 1]) if entry + 1 < len(offsets) else self.index.offset

    def _read_line(self, entry: int) -> bytes:
        return storage.read(self.file, int(self.axis("at")[entry]), self._line_end(entry))

    def _is_valid(self, line: bytes, entry: int) -> bool:
        return bool(zlib.crc32(line) == self.axis("sum")[entry])

    def _path(self, number: int, level: int) -> Path:
        return self.folder / f"{number}.{level}"

    def _map(self, name: str, count: int) -> Float64:
        if not count:
            return np.empty(0)
        return np.memmap(self.folder / name, "<f8", "r", shape=(count,))

    def _load_index(self) -> Index:
        try:
            data = json.loads((self.folder / INDEX).read_bytes())
            return Index(**data) if data["version"] == VERSION else Index()
        except (OSError, ValueError, TypeError, KeyError):
            return Index()

    def _store(self, index: Index) -> None:
        storage.write(str(self.folder / INDEX), json.dumps(asdict(index)).encode())
        self.index = index

    @contextlib.contextmanager
    def _lock(self) -> Iterator[bool]:
        """Hold the folder's lock; yield False if another process holds it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / LOCK).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
                return
            yield True


def _write_at(file: Path, position: int, values: Any) -> None:
    """Write values from a position in a file, which never shrinks: a thread may have mapped it."""
    with file.open("r+b" if file.exists() else "w+b") as opened:
        opened.seek(position * values.itemsize)
        opened.write(values.tobytes())


def _single_buckets(values: Any) -> Any:
    buckets = np.empty(len(values), BUCKET)
    buckets["low"] = buckets["high"] = buckets["mean"] = values
    buckets["count"] = np.isfinite(values)
    return buckets


def _merge(values: Any, size: int) -> Any:
    """Merge every `size` neighbouring values or buckets into a bucket."""
    finer = values if values.dtype == BUCKET else _single_buckets(values)
    num_buckets = -(-len(finer) // size)
    padded = np.zeros(num_buckets * size, BUCKET)
    for name in ("low", "high", "mean"):
        padded[name] = np.nan
    padded[: len(finer)] = finer
    groups = padded.reshape(num_buckets, size)
    merged = np.empty(num_buckets, BUCKET)
    merged["low"] = np.fmin.reduce(groups["low"], axis=1)
    merged["high"] = np.fmax.reduce(groups["high"], axis=1)
    counts = groups["count"].astype(np.float64)
    sums = np.where(counts > 0, groups["mean"].astype(np.float64), 0.0) * counts
    total = counts.sum(axis=1)
    mean = np.full(num_buckets, np.nan)
    merged["count"] = total
    merged["mean"] = np.divide(sums.sum(axis=1), total, out=mean, where=total > 0)
    return merged


def _merge_groups(buckets: Any, group_size: int) -> tuple[Float32, Float32, Float32]:
    """Return mean, minimum and maximum by bucket group."""
    merged = buckets if group_size == 1 else _merge(buckets, group_size)
    return tuple(np.ascontiguousarray(merged[name]) for name in ("mean", "low", "high"))  # type: ignore[return-value]
