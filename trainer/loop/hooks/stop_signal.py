"""Signals that ask a run to save and stop: a single rank receives one, and all ranks stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .hook import Hook


class StopSignal(Hook):
    """Tells all ranks that this rank was asked to stop."""

    def __init__(self, asked: Callable[[], bool]) -> None:
        self.asked = asked

    def measure(self) -> Mapping[str, Any]:
        return {"stop": self.asked()}
