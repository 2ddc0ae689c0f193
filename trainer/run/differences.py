"""Differences between two configurations, one line for each."""

from __future__ import annotations

from typing import Any

from ...console import config as reader


def differences(stored: Any, wanted: Any, path: str = "") -> list[str]:
    """Return where two configurations differ: `optimizer.lr: 0.001 there, 0.002 here`."""
    stored, wanted = reader.plain(stored), reader.plain(wanted)
    if isinstance(stored, dict) and isinstance(wanted, dict):
        lines = []
        for key in [*stored, *(key for key in wanted if key not in stored)]:
            inner = f"{path}.{key}" if path else str(key)
            lines += differences(stored.get(key), wanted.get(key), inner)
        return lines
    if stored == wanted:
        return []
    return [f"{path}: {stored!r} there, {wanted!r} here"]
