"""Check a run's records when it resumes from a checkpoint, and truncate them to its step.

Ledger and metrics are made durable before a checkpoint is sealed. So if the ledger does not lead to
the checkpoint, its file was changed or lost.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from ...console import log as logs
from ...console.errors import IntegrityError
from ...dataplane.runlog import decisions, ledger
from ...dataplane.runlog import writer as lines
from ...dataplane.runlog.decisions import RecordedDecision
from ...dataplane.runlog.ledger import LedgerEntry
from ..checkpoints import store as checkpoints
from ..checkpoints.store import RunState
from ..folders.folder import RunFolder
from ..loop.batches import RunPlan
from ..run.job import Job
from ..scores.records import read_gaps

if TYPE_CHECKING:
    from ...dataplane.order.plan import Plan

log = logs.get_logger(__name__)


def truncate_to_checkpoint(
    folder: RunFolder, plan: RunPlan, state: RunState, *, new_ledger: bool, keep_tails: int
) -> None:
    """Check the ledger against the checkpoint, and truncate all records to the checkpoint's step.

    The lines cut off, a record's tail, go into a file beside it; each record keeps its latest
    `keep_tails` tails. Raise IntegrityError if the ledger does not lead to the checkpoint; with
    `new_ledger`, rename it instead, and begin a new one at the checkpoint.
    """
    if state.step > plan.first_step:
        _ensure_ledger(folder, last_ledger_entry(plan, state), new_ledger=new_ledger)
    for path in folder.records:
        tail = lines.cut(path, state.step)
        if tail is not None:
            log.info("cut %s back to step %d; the tail is in %s", path.name, state.step, tail.name)
        tails = lines.list_tails(path)  # the oldest first
        for old_tail in tails[: max(0, len(tails) - keep_tails)]:
            old_tail.unlink()


def read_decisions(folder: RunFolder, plan: Plan, state: RunState) -> list[RecordedDecision]:
    """Read the run's decisions; raise if the checkpoint or the ledger knows of a lost one."""
    recorded = decisions.read_run(folder.root, plan.hash)
    if (count := state.mixing.get("decisions", 0)) > len(recorded):
        raise IntegrityError(
            f"{folder.decisions} has {len(recorded)} decisions, and the checkpoint of step "
            f"{state.step} was saved after {count}",
            hint=decisions.HINT,
        )
    return recorded


def is_finished(job: Job) -> bool:
    """Return True if the run has saved its last step, and its scores there were computed or have
    failed. A run in a read-only folder needs no scores."""
    if not checkpoints.reached(job.folder.checkpoints, job.plan.end_step):
        return False
    is_read_only = not os.access(job.folder.root, os.W_OK)
    gaps = read_gaps(job.folder, job.run.scores, job.plan.end_step)
    return is_read_only or all(gap.reason is not None for gap in gaps)


def last_ledger_entry(plan: RunPlan, state: RunState) -> LedgerEntry:
    """Return the ledger entry for the last step in a checkpoint."""
    step = plan.step(state.step - 1)
    return LedgerEntry(step.number, step.first_row, step.rows, state.ledger)


def _ensure_ledger(folder: RunFolder, end: LedgerEntry, *, new_ledger: bool) -> None:
    """Ensure that the ledger leads to the entry `end`, by a new ledger if allowed."""
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
        old_ledger, number = folder.ledger.with_suffix(".old.jsonl"), 1
        while old_ledger.exists():
            number += 1
            old_ledger = folder.ledger.with_suffix(f".old-{number}.jsonl")
        folder.ledger.rename(old_ledger)
        log.warning("the old ledger is in %s", old_ledger.name)
    log.warning("%s: a new ledger begins at step %d", problem, end.step)
    ledger.begin(folder.ledger, end)
