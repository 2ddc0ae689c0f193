"""Random access to a run's step lines: JSON lines sorted by step, searched by bisection."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...console.errors import IntegrityError, StorageError
from ..storage import storage
from .writer import decode_line

METRICS = "metrics.jsonl"
"""File in a run's folder with losses and speed, step by step."""


def has_step(line: dict[str, Any]) -> bool:
    return type(line.get("step")) is int


class StepLines:
    """The complete lines of a file. A killed writer may leave the last line incomplete."""

    def __init__(
        self, file: str | Path, is_whole: Callable[[dict[str, Any]], bool] = has_step
    ) -> None:
        """`is_whole` tells whether a line is undamaged."""
        self.where = str(file)
        self.is_whole = is_whole
        self.data: bytes | mmap.mmap
        if storage.is_local(self.where):
            try:
                with storage.local_path(self.where).open("rb") as opened:
                    size = os.fstat(opened.fileno()).st_size  # an empty file cannot be mapped
                    read = mmap.ACCESS_READ
                    self.data = mmap.mmap(opened.fileno(), 0, access=read) if size else b""
            except OSError as error:
                raise StorageError(f"cannot read {file}: {error.strerror}") from None
        else:
            self.data = storage.read(self.where)
        self.end = self.data.rfind(b"\n") + 1

    def __enter__(self) -> StepLines:
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self.data, mmap.mmap):
            self.data.close()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        offset = 0
        while offset < self.end:
            yield self._line(offset)
            offset = self._next(offset)

    def last(self) -> dict[str, Any] | None:
        return self._line(self._previous(self.end)) if self.end else None

    def find(self, step: int) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Find the line before a step, and the first line at or after it."""
        offset = self._offset(step)
        before = self._line(self._previous(offset)) if offset else None
        return before, self._line(offset) if offset < self.end else None

    def through(self, step: int) -> memoryview:
        """Return the bytes of the lines up to a step, with the step's."""
        return memoryview(self.data)[: self._offset(step + 1)]

    def between(self, first: int, end: int) -> Iterator[dict[str, Any]]:
        """Yield the lines of the steps [first, end)."""
        offset = self._offset(first)
        while offset < self.end and (line := self._line(offset))["step"] < end:
            yield line
            offset = self._next(offset)

    def with_key(self, key: str) -> Iterator[dict[str, Any]]:
        """Yield the lines that have a key; other lines are not decoded."""
        text, offset = f'"{key}"'.encode(), 0
        while (position := self.data.find(text, offset, self.end)) >= 0:
            line = self._line(self._previous(position))
            offset = self._next(position)
            if key in line:
                yield line

    def _offset(self, step: int) -> int:
        """Return the start of the first line at or after a step."""
        low, high = 0, self.end  # offsets of lines
        while low < high:
            middle = self._previous((low + high) // 2 + 1)
            if self._line(middle)["step"] < step:
                low = self._next(middle)
            else:
                high = middle
        return low

    def _previous(self, offset: int) -> int:
        """Return the start of the line that holds the byte before `offset`."""
        return self.data.rfind(b"\n", 0, offset - 1) + 1

    def _next(self, offset: int) -> int:
        return self.data.find(b"\n", offset) + 1

    def _line(self, offset: int) -> dict[str, Any]:
        line = self.data[offset : self._next(offset)]
        entry = decode_line(line)
        if entry is None or not self.is_whole(entry):
            raise IntegrityError(
                f"{self.where} has an invalid line: {line[:160]!r}",
                hint="restore it from a copy; without it, audit the run's plan.json",
            )
        return entry
