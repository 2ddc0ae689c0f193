"""Check a request against a run as it stands, and leave it in the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...console.errors import PlanError
from ...dataplane.order.stream import Stream
from ...dataplane.runlog import ledger
from ...dataplane.runlog.decisions import PLAN, load_run_plan, read_run
from .decide import LEAD_STEPS, decide_by_hand
from .request import SteerRequest, write_request


def ask_run(run: Path, shares: Mapping[str, float], step: int | None) -> SteerRequest:
    """Leave a request; raise PlanError if the run would refuse it now. The run checks it again."""
    if not (run / PLAN).exists():
        raise PlanError(
            f"there is no run of a mixture in {run}",
            hint="name the folder of a run on this machine",
        )
    plan = load_run_plan(run)
    recorded = read_run(run, plan.hash)
    file = run / ledger.NAME
    newest = ledger.read_last(file) if file.exists() else None
    next_step = plan.first_step if newest is None else newest.step + 1
    if next_step >= plan.end_step:
        raise PlanError(f"{run} has taken all of its {plan.end_step:,} steps")
    decide_by_hand(Stream(plan), recorded, shares, next_step + LEAD_STEPS, step, "")
    return write_request(run, shares, step)
