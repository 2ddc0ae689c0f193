"""Differences between two configurations."""

from __future__ import annotations

from typing import Any, NamedTuple

from .config import plain


class Difference(NamedTuple):
    """A value that differs between two configurations: `optimizer.lr: 0.001 there, 0.002 here`."""

    path: str
    remote: Any
    local: Any

    def __str__(self) -> str:
        return f"{self.path}: {self.remote!r} there, {self.local!r} here"


def differences(remote: Any, local: Any, path: str = "") -> list[Difference]:
    """Return where two configurations differ; a missing key counts as None."""
    remote, local = plain(remote), plain(local)
    if isinstance(remote, dict) and isinstance(local, dict):
        changed = []
        for key in remote | local:
            inner = f"{path}.{key}" if path else str(key)
            changed += differences(remote.get(key), local.get(key), inner)
        return changed
    return [] if remote == local else [Difference(path, remote, local)]
