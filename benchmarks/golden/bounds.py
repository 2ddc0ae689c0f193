"""Bounds of a comparison between machines, versions or numbers of threads."""

from __future__ import annotations

from .cases import Case
from .compare import Bounds, Limits

LIMITS = Limits(loss=Bounds(1e-6, 1.0, 0.1), norm=Bounds(1e-5, 1.0, 0.5))


def limits_of(case: Case) -> Limits:
    return LIMITS
