"""Oracles of memory: counts of a schedule's lists."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.trainer.layout.schedules import StageAction


def max_in_flight(order: Sequence[StageAction], sizes: Sequence[float] | None = None) -> float:
    """Count the micro-batches in flight at the fullest moment, or sum their `sizes` by chunk."""
    in_flight = fullest = 0.0
    for action in order:
        size = 1.0 if sizes is None else sizes[action.chunk]
        in_flight += size if action.kind == "forward" else -size
        fullest = max(fullest, in_flight)
    return fullest
