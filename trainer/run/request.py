"""A run as the command line asks for it, before anything is resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Request:
    """Files, folder and overrides that the command line names."""

    run: str | None = None
    mixture: str | None = None
    model: str | None = None
    out: str | None = None
    layout: str | None = None
    """File of a layout plan (layout_plan.py)."""
    overrides: Sequence[str] = ()
    slurm: bool = False
    """True if the run is to be a batch job rather than to start here."""

    dry_run: bool = False
    """True if nothing starts: the run may be meant for a machine with other devices."""

    def overrides_of(self, prefix: str) -> list[str]:
        """Return the overrides of the mixture's or the model's file, without the prefix."""
        start = f"{prefix}."
        return [word.removeprefix(start) for word in self.overrides if word.startswith(start)]

    @property
    def run_overrides(self) -> list[str]:
        """Overrides of the run's own keys."""
        return [word for word in self.overrides if not word.startswith(("mixture.", "model."))]
