"""What the step loop asks of a run's checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .fragments import Fragment
from .store import RunState


class Checkpoints(Protocol):
    """Saves and restores the run's checkpoints (checkpoints/saver.py)."""

    @property
    def failed(self) -> bool: ...

    def save(self, fragments: Sequence[Fragment], state: RunState) -> None: ...

    def wait(self) -> None: ...

    def poll(self) -> None: ...

    def restore(self) -> RunState:
        """Load the newest planned checkpoint into the engine, and return the state. Collective."""
