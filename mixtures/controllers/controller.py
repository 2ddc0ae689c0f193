"""Base class for controllers: what they measure, when they decide, and within which bounds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Shares = Mapping[str, float]
State = Mapping[str, Any]
"""What a controller remembers from one decision to the next, as JSON."""


@dataclass(frozen=True, kw_only=True)
class Observed:
    """What the run has measured since the last decision; fields are keys in decisions.jsonl."""

    losses: Mapping[str, float]
    """Mean loss by source, of the sources that gave rows."""
    held_out: Sequence[float]
    """Held-out loss of each evaluation."""


@dataclass(frozen=True, kw_only=True)
class Controller(ABC):
    """Decides the shares of a phase's sources while the run goes on.

    A subclass sets `kind` to its name in the YAML. Its decisions follow from their arguments alone,
    so that the audit can repeat them.
    """

    kind: str
    """What decides the shares while the run goes on: a name in CONTROLLERS."""

    @abstractmethod
    def is_due(self, steps: int, observed: Observed, state: State) -> bool:
        """Tell whether to decide after so many steps of the phase."""

    @abstractmethod
    def decide(self, shares: Shares, observed: Observed, state: State) -> tuple[Shares, State]:
        """Return new shares, which sum to about 1, and the new state. `shares` hold until now."""

    @abstractmethod
    def bounds(self, shares: Shares, steps: int) -> Mapping[str, tuple[float, float]]:
        """Return the smallest and the largest share that a source may get in a phase with so many
        steps, which begins with `shares`."""

    @abstractmethod
    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield wrong settings: key ("" for all of `control`) and message."""

    def source_problems(self, sources: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Yield settings that contradict the sources from which the phase draws."""
        if len(sources) < 2:
            yield (
                "",
                f"decides between sources, and the phase draws from {', '.join(sources)} alone",
            )

    @property
    def needs_evaluations(self) -> bool:
        """True if decisions follow from held-out losses."""
        return False

    @property
    def watched(self) -> str | None:
        """The source whose held-out loss is observed; None: the mean of all."""
        return None
