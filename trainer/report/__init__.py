"""A run's report: one HTML file that needs nothing else, to be looked at rather than read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...dataplane.storage import storage
from ..folder import RunFolder
from . import comparison, page
from .data import RunData, first_difference


def write(folders: Sequence[str], out: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Draw the report of one run, or of several side by side. Returns where, and the facts."""
    runs = [RunData.load(RunFolder(folder)) for folder in folders]
    target = Path(out) if out else RunFolder(folders[0]).report
    if out is None and len(runs) > 1:
        target = RunFolder(folders[0]).comparison
    text = page.one(runs[0]) if len(runs) == 1 else comparison.several(runs)
    storage.write(str(target), text.encode())
    summaries = [run.summary() for run in runs]
    for run, summary in zip(runs[1:], summaries[1:], strict=True):
        summary["first_difference"] = first_difference(runs[0], run)
    return target, {"report": str(target), "runs": summaries}
