"""Differences between two configurations."""

from __future__ import annotations

from typing import Any, NamedTuple

from .config import plain


class Difference(NamedTuple):
    """A value that two configurations do not share: `optimizer.lr: 0.001 there, 0.002 here`."""

    path: str
    there: Any
    here: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.there!r} there, {self.here!r} here"


def differences(there: Any, here: Any, path: str = "") -> list[Difference]:
    """Return where two configurations differ; a missing key has the value None."""
    there, here = plain(there), plain(here)
    if isinstance(there, dict) and isinstance(here, dict):
        changed = []
        for key in [*there, *(key for key in here if key not in there)]:
            inner = f"{path}.{key}" if path else str(key)
            changed += differences(there.get(key), here.get(key), inner)
        return changed
    return [] if there == here else [Difference(path, there, here)]
