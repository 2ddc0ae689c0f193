"""Check the records of earlier starts when a run resumes, then truncate them to the checkpoint.

Ledger and metrics are durable before a checkpoint is sealed. A ledger that does not lead to the
checkpoint was changed, or lost.
"""

from __future__ import annotations

import os

from ...console import log as logs
from ...console.errors import IntegrityError
from ...dataplane.runlog import ledger
from ...dataplane.runlog import writer as lines
from ...dataplane.runlog.ledger import LedgerEntry
from ..checkpoints import store as checkpoints
from ..checkpoints.store import RunState
from ..folders.folder import RunFolder
from ..loop.batches import RunPlan
from ..run.job import Job
from ..scores.records import read_gaps

log = logs.get_logger(__name__)


def truncate_to_checkpoint(
    folder: RunFolder, plan: RunPlan, state: RunState, *, new_ledger: bool, keep_tails: int
) -> None:
    """Check the ledger against the checkpoint, and truncate all records to the checkpoint's step.
    The latest `keep_tails` tails of every record are kept.

    With `new_ledger`, a ledger that does not lead to the checkpoint is renamed, and a new ledger
    begins at the checkpoint.
    """
    if state.step > plan.first_step:
        _check_ledger(folder, last_ledger_entry(plan, state), new_ledger=new_ledger)
    for path in folder.records:
        tail = lines.cut(path, state.step)
        if tail is not None:
            log.info("cut %s back to step %d; the tail is in %s", path.name, state.step, tail.name)
        tails = lines.list_tails(path)
        for outdated in tails[: max(0, len(tails) - keep_tails)]:
            outdated.unlink()


def is_finished(job: Job) -> bool:
    """Return True if the run has taken all steps, and scored its last checkpoint if configured."""
    if not checkpoints.reached(job.folder.checkpoints, job.plan.end_step):
        return False
    archived = not os.access(job.folder.root, os.W_OK)
    gaps = read_gaps(job.folder, job.run.scores, job.plan.end_step)
    return archived or all(gap.reason is not None for gap in gaps)


def last_ledger_entry(plan: RunPlan, state: RunState) -> LedgerEntry:
    """Return the ledger entry for the last step in a checkpoint."""
    step = plan.step(state.step - 1)
    return LedgerEntry(step.number, step.first_row, step.rows, state.ledger)


def _check_ledger(folder: RunFolder, end: LedgerEntry, *, new_ledger: bool) -> None:
    gap = ledger.find_gap(folder.ledger, end)
    if gap is None:
        return
    problem = f"{folder.ledger} {gap}, and the checkpoint is the result of steps up to {end.step}"
    if not new_ledger:
        raise IntegrityError(
            problem,
            hint="restore the ledger from a copy; or go on without a proof of these steps: "
            "--new-ledger keeps the old file and begins a new ledger at the checkpoint",
        )
    if folder.ledger.exists():
        path, number = folder.ledger.with_suffix(".old.jsonl"), 1
        while path.exists():
            number += 1
            path = folder.ledger.with_suffix(f".old-{number}.jsonl")
        folder.ledger.rename(path)
        log.warning("the old ledger is in %s", path.name)
    log.warning("%s: a new ledger begins at step %d", problem, end.step)
    ledger.begin(folder.ledger, end)
