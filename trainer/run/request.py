"""A run as the command line describes it, before anything is resolved."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Files, folder and overrides on the command line."""

    run: str | None = None
    mixture: str | None = None
    model: str | None = None
    out: str | None = None
    layout: str | None = None
    """File with a layout plan (layout_plan.py)."""
    overrides: Sequence[str] = ()
    slurm: bool = False
    """True if the run becomes a batch job and does not start here."""

    dry_run: bool = False
    """True if nothing starts: the run may be meant for a machine with different devices."""

    def select_overrides(self, file: str) -> list[str]:
        """Return the overrides for `mixture` or `model`, without this prefix."""
        prefix = f"{file}."
        return [word.removeprefix(prefix) for word in self.overrides if word.startswith(prefix)]

    @property
    def run_overrides(self) -> list[str]:
        """Overrides for keys in run.yaml."""
        return [word for word in self.overrides if not word.startswith(("mixture.", "model."))]
