"""Report of a run, or of several side by side: one HTML file that loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...dataplane.storage import storage
from ..folder import RunFolder
from . import comparison, page
from .data import RunData, first_difference


def write(folders: Sequence[str], out: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Write the report of one run, or the comparison of several. Returns its path and a summary."""
    runs = [RunData.load(RunFolder(folder)) for folder in folders]
    target = Path(out) if out else RunFolder(folders[0]).report
    if out is None and len(runs) > 1:
        target = RunFolder(folders[0]).comparison
    text = page.run_page(runs[0]) if len(runs) == 1 else comparison.comparison_page(runs)
    storage.write(str(target), text.encode())
    summaries = [run.summary() for run in runs]
    for run, summary in zip(runs[1:], summaries[1:], strict=True):
        summary["first_difference"] = first_difference(runs[0], run)
    return target, {"report": str(target), "runs": summaries}
