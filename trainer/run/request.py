"""What a person asks for on the command line: which run, and what of this start of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a person asked for on the command line."""

    run: str | None = None
    mixture: str | None = None
    model: str | None = None
    out: str | None = None
    overrides: Sequence[str] = ()
    slurm: bool = False
    """It is to run as a batch job, and not here."""

    def part(self, prefix: str) -> list[str]:
        """The overrides that reach into the mixture's or the model's file."""
        start = f"{prefix}."
        return [word.removeprefix(start) for word in self.overrides if word.startswith(start)]

    @property
    def own(self) -> list[str]:
        return [word for word in self.overrides if not word.startswith(("mixture.", "model."))]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What is asked of one start, and is no part of the run."""

    stop_after: int | None = None
    """Interrupt the run after so many steps of the plan."""
    fallback: bool = False
    """Pass over checkpoints that are damaged."""
    profile: range | None = None
    """Steps to trace."""
    debug: bool = False
    began: float = field(default_factory=time.time)
    """When it was asked for."""

    def words(self) -> list[str]:
        """As options of the worker."""
        words = [f"--began={self.began}"]
        if self.stop_after is not None:
            words.append(f"--stop-after={self.stop_after}")
        if self.profile is not None:
            words.append(f"--profile={self.profile.start}:{self.profile.stop}")
        return [*words, *["--fallback"] * self.fallback, *["--debug"] * self.debug]


def steps_between(text: str) -> range:
    """`10:15`: steps 10 to 14."""
    first, _, last = text.partition(":")
    if not (first.isdecimal() and last.isdecimal() and int(first) < int(last)):
        raise ValueError(f"steps are written FIRST:LAST, as in 10:15, not {text}")
    return range(int(first), int(last))
