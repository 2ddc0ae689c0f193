"""Results of a long request as files of consecutive items: what is complete survives a kill.

    part-0000000000-0000000128.0-of-2.parquet   items 0 to 127, two slices
    part-0000000000-0000000128.1-of-2.parquet
    part-0000000128-0000000256.0-of-1.parquet   items 128 to 255

A part counts if all its slices exist and all items before it are in parts. The position of a
request is therefore one number, whatever the number of ranks.
"""

from __future__ import annotations

import re
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ...console.errors import StorageError, file_fault
from ...dataplane.storage.atomic import HALF_WRITTEN, replacing

NAME = re.compile(r"part-(\d+)-(\d+)\.(\d+)-of-(\d+)\.parquet")
PREFIX = "part-"
FOLDER = "parts"
"""Folder of the parts that are a command's result."""
SHARE, SHORTEST, LONGEST = 0.01, 1.0, 60.0
"""A buffered part is written after this share of the time since the start, in seconds at least and
at most: a kill costs little, and long requests have few files."""


def part_path(folder: Path, first: int, end: int, number: int = 0, slices: int = 1) -> Path:
    """Return the path of a slice. Names sort like the items, as readers of folders expect."""
    return folder / f"{PREFIX}{first:010}-{end:010}.{number}-of-{slices}.parquet"


def write_table(path: Path, table: pa.Table) -> None:
    """Write a Parquet file atomically and durably."""
    try:
        with replacing(path) as file:
            pq.write_table(table, file)
    except OSError as error:
        reason, hint = file_fault(error)
        raise StorageError(f"cannot write {path}: {reason}", hint=hint) from None


def list_parts(folder: Path) -> tuple[int, list[Path]]:
    """Return the number of items in complete parts, and their files in order."""
    slices: dict[tuple[int, int, int], dict[int, Path]] = {}
    for path in folder.iterdir():
        if match := NAME.fullmatch(path.name):
            first, end, number, count = map(int, match.groups())
            slices.setdefault((first, end, count), {})[number] = path
    complete = {
        first: (end, [paths[number] for number in range(count)])
        for (first, end, count), paths in sorted(slices.items())
        if len(paths) == count
    }
    reached, files = 0, []
    while reached in complete:
        reached, paths = complete[reached]
        files += paths
    return reached, files


def resume(folder: Path) -> int:
    """Remove what a killed process left after the complete parts; return their number of items."""
    reached, files = list_parts(folder)
    for path in folder.iterdir():
        name = path.name
        if HALF_WRITTEN.fullmatch(name) or (NAME.fullmatch(name) and path not in files):
            path.unlink()
    return reached


class PartWriter:
    """Collects rows of consecutive items, and writes them as parts when it is time."""

    def __init__(self, folder: Path, first: int) -> None:
        self.folder, self.first = folder, first
        self.tables: list[pa.Table] = []
        self.began = self.written = time.monotonic()

    def add(self, table: pa.Table) -> None:
        """Add a row for each of the next items."""
        self.tables.append(table)
        now = time.monotonic()
        interval = min(max((now - self.began) * SHARE, SHORTEST), LONGEST)
        if now - self.written >= interval:
            self.flush()

    def flush(self) -> None:
        if not self.tables:
            return
        table = pa.concat_tables(self.tables)
        end = self.first + len(table)
        write_table(part_path(self.folder, self.first, end), table)
        self.first, self.tables, self.written = end, [], time.monotonic()
