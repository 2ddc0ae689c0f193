"""The rows behind a run's weights: its own, and those of the runs that it continues.

runs/base   rows [0, 800)      ─┐
runs/math   rows [800, 1200)   ─┴─  the weights of runs/math
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ...console.errors import PlanError, UserError
from ...console.progress import exact_count
from ...dataplane.arrays import Int64
from ...dataplane.order.plan import Parent, Plan
from ...dataplane.order.stream import Stream
from ...dataplane.runlog import ledger
from ...dataplane.runlog.decisions import load_run_plan
from ...dataplane.storage import storage
from ..planning.branch_point import checkpoint_steps
from ..planning.open_plan import open_plan


@dataclass(frozen=True, eq=False)
class ServedRows:
    """Rows that a run has served, or will serve."""

    run: str
    """Folder of the run; for a mixture or a saved plan, its name."""
    stream: Stream
    end_row: int
    """One past the last row that belongs to the lineage: the plan's end, or the branch."""
    taken_rows: int | None
    """One past the last row that the run has taken; None without a ledger."""
    ledger: str | None = None
    """Path of the run's ledger; None if there is none."""

    @property
    def plan(self) -> Plan:
        return self.stream.plan

    @cached_property
    def undone_steps(self) -> Int64:
        """[n, 2] Steps [first, end) that the weights do not hold: skipped, or rolled back within
        the lineage."""
        if self.ledger is None or self.end_row == self.plan.first_row:
            return np.empty((0, 2), np.int64)
        last_step = self.plan.step_at(self.end_row - 1).number
        spans = [span for span in ledger.find_skipped(self.ledger) if span[1] <= last_step + 1]
        return np.array(spans, np.int64).reshape(-1, 2)


@dataclass(frozen=True, eq=False)
class Lineage:
    """A run, with the rows behind its weights."""

    name: str
    served: tuple[ServedRows, ...]
    """The oldest run first."""
    checkpoints: tuple[int, ...]
    """Steps of the run's own checkpoints."""
    unknown: str | None = None
    """Why the rows before the oldest run here are unknown; None if there are none."""

    @property
    def taken_steps(self) -> int | None:
        """Steps that the run has taken; None without a ledger."""
        newest = self.served[-1]
        if newest.taken_rows is None:
            return None
        if newest.taken_rows == newest.plan.first_row:
            return newest.plan.first_step
        return newest.plan.step_at(newest.taken_rows - 1).number + 1

    def format_json(self) -> str:
        data = {
            "run": self.name,
            "steps_taken": self.taken_steps,
            "checkpoints": self.checkpoints,
            "continues": [served.run for served in self.served[:-1]],
        }
        return json.dumps(data | ({} if self.unknown is None else {"unknown": self.unknown}))

    def format_text(self) -> str:
        facts = [
            "no ledger: rows are planned"
            if self.taken_steps is None
            else f"has taken {exact_count(self.taken_steps, 'steps')}"
        ]
        if len(self.served) > 1:
            facts.append(f"continues {', '.join(served.run for served in self.served[:-1])}")
        lines = [f"{self.name} ({'; '.join(facts)})"]
        if self.unknown is not None:
            first_row = self.served[0].plan.first_row
            lines.append(f"  rows before {first_row:,} are unknown: {self.unknown}")
        return "\n".join(lines)


def open_lineages(names: Sequence[str]) -> list[Lineage]:
    """Open runs with the runs that they continue; a run behind several is opened once."""
    streams: dict[str, Stream] = {}
    return [_open_lineage(name, streams) for name in dict.fromkeys(names)]


def _open_lineage(name: str, streams: dict[str, Stream]) -> Lineage:
    opened = open_plan(name)
    taken_rows = _taken_rows(opened.plan, opened.ledger) if opened.ledger else None
    served = [ServedRows(name, opened.stream, opened.plan.end_row, taken_rows, opened.ledger)]
    unknown = None
    try:
        served += _open_parents(served[0], streams)
    except UserError as error:
        unknown = error.message
    is_run = opened.run is not None
    checkpoints = tuple(checkpoint_steps(name)) if is_run else ()
    if checkpoints:
        _check_checkpoint(name, checkpoints[-1], opened.plan)
    return Lineage(name, tuple(reversed(served)), checkpoints, unknown)


def _check_checkpoint(run: str, step: int, plan: Plan) -> None:
    """Raise if a checkpoint was saved under another plan than the run's folder holds: a ledger
    under a plan with other rows of the same number would be read as that plan's."""
    file = storage.join(run, "checkpoints", f"step-{step:08d}", "state.json")
    if not storage.exists(file):  # the files of a checkpoint may lie in a store
        return
    saved_plan = json.loads(storage.read(file))["plan_hash"]
    if saved_plan != plan.hash:
        raise PlanError(
            f"the run's checkpoint of step {step:,} belongs to the plan {saved_plan}, and its "
            f"plan.json is {plan.hash}",
            where=file,
            hint="restore the plan.json that the run was started with",
        )


def _open_parents(child: ServedRows, streams: dict[str, Stream]) -> Iterator[ServedRows]:
    """Yield the runs that a run continues, the newest first."""
    parent = child.plan.parent
    while parent is not None:
        stream = streams.setdefault(parent.run, _open_parent(parent))
        has_begun = child.taken_rows is not None
        file = storage.join(parent.run, ledger.NAME)
        taken_rows = parent.row if has_begun else None
        has_ledger = storage.exists(file)
        if not has_begun and has_ledger:
            taken_rows = min(parent.row, _taken_rows(stream.plan, file))
        child = ServedRows(parent.run, stream, parent.row, taken_rows, file if has_ledger else None)
        yield child
        parent = stream.plan.parent


def _open_parent(parent: Parent) -> Stream:
    plan = load_run_plan(parent.run)
    if plan.hash != parent.hash:
        raise PlanError(f"the run {parent.run} has another plan than the one that was continued")
    return Stream(plan)


def _taken_rows(plan: Plan, file: str) -> int:
    """Return one past the last row that a run has taken; raise if its ledger has another plan."""
    newest = ledger.read_last(file)
    if newest is None:
        return plan.first_row
    has_step = plan.first_step <= newest.step < plan.end_step
    step = plan.step(newest.step) if has_step else None
    if step is None or (step.first_row, step.rows) != (newest.first_row, newest.rows):
        planned = f"rows {step.first_row:,} to {step.end_row:,}" if step else "no such step"
        raise PlanError(
            f"the ledger belongs to another plan: its step {newest.step:,} took rows "
            f"{newest.first_row:,} to {newest.end_row:,}, and the plan has {planned}",
            where=file,
            hint="restore the plan.json that the run was started with",
        )
    return newest.end_row
