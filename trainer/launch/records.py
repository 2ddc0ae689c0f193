"""Records of earlier starts when a run resumes: proved first, then cut back to the checkpoint.

Ledger and metrics are made durable before a checkpoint is sealed. A ledger that does not lead to
its checkpoint was changed, or lost.
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
from ..scores.records import missing_of

log = logs.get_logger(__name__)


def take_up(
    folder: RunFolder, plan: RunPlan, state: RunState, *, new_ledger: bool, keep_tails: int
) -> None:
    """Check the ledger against the checkpoint, and cut all records after it. Of each record, the
    latest `keep_tails` tails are kept.

    With `new_ledger`, a ledger that does not lead to the checkpoint is set aside, and a new one
    begins there.
    """
    if state.step > plan.first_step:
        _check_ledger(folder, last_step(plan, state), new_ledger=new_ledger)
    for path in folder.records:
        tail = lines.cut(path, state.step)
        if tail is not None:
            log.info("cut %s back to step %d; the tail is in %s", path.name, state.step, tail.name)
        tails = lines.tails(path)
        for outdated in tails[: max(0, len(tails) - keep_tails)]:
            outdated.unlink()


def finished(job: Job) -> bool:
    """Return True if the run has nothing left to do: it has taken all of its steps, and scored its
    last checkpoint if it was to."""
    if not checkpoints.reached(job.folder.checkpoints, job.plan.end_step):
        return False
    archived = not os.access(job.folder.root, os.W_OK)
    missing = missing_of(job.folder, job.run.scores, job.plan.end_step)
    return archived or all(each.reason is not None for each in missing)


def last_step(plan: RunPlan, state: RunState) -> LedgerEntry:
    """Return the ledger's entry of the last step that is in a checkpoint."""
    step = plan.step(state.step - 1)
    return LedgerEntry(step.number, step.first_row, step.rows, state.ledger)


def _check_ledger(folder: RunFolder, end: LedgerEntry, *, new_ledger: bool) -> None:
    why = ledger.gap(folder.ledger, end)
    if why is None:
        return
    what = f"{folder.ledger} {why}, and the checkpoint is the result of steps up to {end.step}"
    if not new_ledger:
        raise IntegrityError(
            what,
            hint="restore the ledger from a copy; or go on without a proof of these steps: "
            "--new-ledger keeps the old file and begins a new ledger at the checkpoint",
        )
    if folder.ledger.exists():
        place, number = folder.ledger.with_suffix(".old.jsonl"), 1
        while place.exists():
            number += 1
            place = folder.ledger.with_suffix(f".old-{number}.jsonl")
        folder.ledger.rename(place)
        log.warning("the old ledger is in %s", place.name)
    log.warning("%s: a new ledger begins at step %d", what, end.step)
    ledger.begin(folder.ledger, end)
