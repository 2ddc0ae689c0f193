"""Write a run's report, or a comparison between runs, as a self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...console.errors import MisuseError
from ...console.log import get_logger
from ...dataplane.storage import storage
from ...trainer.folders.folder import RunFolder
from ..board.runs import shortest_names
from . import comparison, page
from .reading.data import RunData, first_difference
from .reading.loss_unit import common_unit
from .reading.stored import StoredRun

log = get_logger(__name__)


def write_report(folders: Sequence[str], out: str | None = None) -> tuple[Path, dict[str, Any]]:
    """Write a run's report, or a comparison between runs. Return its path and a summary."""
    names = shortest_names([Path(folder) for folder in folders])
    if len(set(names)) < len(names):
        raise MisuseError("one run is named twice", where=", ".join(names))
    stored_runs = [
        StoredRun.open(RunFolder(folder), name) for folder, name in zip(folders, names, strict=True)
    ]
    if len(stored_runs) == 1:
        run = RunData.read(stored_runs[0])
        if run.ledger_damage is not None:
            log.warning("%s %s: it does not prove the run", run.folder.ledger, run.ledger_damage)
        target = Path(out) if out else run.folder.report
        storage.write(str(target), page.run_page(run).encode())
        return target, {"report": str(target), "runs": [run.summary()]}
    target = Path(out) if out else stored_runs[0].folder.comparison
    unit = common_unit(stored_runs)
    runs = [
        RunData.read(stored, sizes, len(stored_runs))
        for stored, sizes in zip(stored_runs, unit.sizes, strict=True)
    ]
    storage.write(str(target), comparison.comparison_page(runs, unit).encode())
    summaries = [run.summary() for run in runs]
    for run, summary in zip(runs[1:], summaries[1:], strict=True):
        summary["first_difference"] = first_difference(runs[0], run)
    return target, {
        "report": str(target), "loss_unit": unit.name, "note": unit.note, "runs": summaries
    }  # fmt: skip
