"""Report of a run, or of several side by side: one HTML file that loads nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...console.errors import MisuseError
from ...dataplane.storage import storage
from ..board.runs import shortest_names
from ..folder import RunFolder
from . import comparison, page
from .data import RunData, first_difference
from .loss_unit import in_one_unit


def write(folders: Sequence[str], out: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Write the report of one run, or the comparison of several. Returns its path and a summary."""
    names = shortest_names([Path(folder) for folder in folders])
    if len(set(names)) < len(names):
        raise MisuseError("one run is named twice", where=", ".join(names))
    runs = [
        RunData.load(RunFolder(folder), name) for folder, name in zip(folders, names, strict=True)
    ]
    if len(runs) == 1:
        target = Path(out) if out else RunFolder(folders[0]).report
        storage.write(str(target), page.run_page(runs[0]).encode())
        return target, {"report": str(target), "runs": [runs[0].summary()]}
    target = Path(out) if out else RunFolder(folders[0]).comparison
    compared, unit, note = in_one_unit(runs)
    text = comparison.comparison_page(compared, unit, note)
    storage.write(str(target), text.encode())
    summaries = [run.summary() for run in compared]
    for run, summary in zip(runs[1:], summaries[1:], strict=True):
        summary["first_difference"] = first_difference(runs[0], run)
    return target, {"report": str(target), "loss_unit": unit, "note": note, "runs": summaries}
