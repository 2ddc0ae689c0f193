"""Parts of a step's bytes or seconds as text, largest first."""

from __future__ import annotations

from collections.abc import Mapping

from ...console.progress import format_bytes
from ...models.accounting.state import HOST

SMALL = 1e-3
"""Fraction of a total below which parts are added up."""


def format_sizes(memory: Mapping[str, int]) -> str:
    """Return the parts of a device's bytes, and after them those in host memory."""
    device = {part: size for part, size in memory.items() if not part.startswith(HOST)}
    host = {part.removeprefix(HOST): size for part, size in memory.items() if part not in device}
    text = _join(device)
    return f"{text}; in host memory {_join(host)}" if host else text


def _join(memory: Mapping[str, int]) -> str:
    parts = merge_small(memory, sum(memory.values()))
    return ", ".join(f"{part} {format_bytes(size)}" for part, size in parts.items())


def merge_small(parts: Mapping[str, float], total: float) -> dict[str, float]:
    """Sort parts from the largest on; those under a thousandth of the total are one."""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    merged = {part: size for part, size in ordered if size >= SMALL * total}
    small = sum(size for _, size in ordered if size < SMALL * total)
    return {**merged, "others": small} if small else merged
