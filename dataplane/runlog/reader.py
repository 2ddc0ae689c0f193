"""Random access to the step lines of a run: JSON lines in the order of steps, by bisection."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...console.errors import IntegrityError, StorageError
from ..storage import storage
from .writer import entry_of

METRICS = "metrics.jsonl"
"""File of a run with the losses and the speed of each step."""


def has_step(line: dict[str, Any]) -> bool:
    return type(line.get("step")) is int


class StepLines:
    """Complete lines of a file. Only the last line can be incomplete, if the writer was killed."""

    def __init__(
        self, file: str | Path, is_whole: Callable[[dict[str, Any]], bool] = has_step
    ) -> None:
        """`is_whole` says whether a line that is read is undamaged."""
        self.where = str(file)
        self.is_whole = is_whole
        self.data: bytes | mmap.mmap
        if storage.is_local(self.where):
            try:
                with storage.local_path(self.where).open("rb") as opened:
                    empty = not os.fstat(opened.fileno()).st_size
                    read = mmap.ACCESS_READ
                    self.data = b"" if empty else mmap.mmap(opened.fileno(), 0, access=read)
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
        place = 0
        while place < self.end:
            yield self._line(place)
            place = self._after(place)

    def last(self) -> dict[str, Any] | None:
        return self._line(self._before(self.end)) if self.end else None

    def find(self, step: int) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Return the line before a step, and the first one from the step on."""
        low, high = 0, self.end  # offsets at which a line begins
        while low < high:
            place = self._before((low + high) // 2 + 1)
            if self._line(place)["step"] < step:
                low = self._after(place)
            else:
                high = place
        before = self._line(self._before(low)) if low else None
        return before, self._line(low) if low < self.end else None

    def _before(self, place: int) -> int:
        """Return the start of the line that holds the byte before `place`."""
        return self.data.rfind(b"\n", 0, place - 1) + 1

    def _after(self, place: int) -> int:
        return self.data.find(b"\n", place) + 1

    def _line(self, place: int) -> dict[str, Any]:
        line = self.data[place : self._after(place)]
        entry = entry_of(line)
        if entry is None or not self.is_whole(entry):
            raise IntegrityError(
                f"{self.where} has an invalid line: {line[:160]!r}",
                hint="restore it from a copy; without it, audit the run's plan.json",
            )
        return entry
