"""Open the plan in a command's argument: a mixture YAML, a saved plan, or a run's folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from ...console.errors import ConfigError, ConfigProblem, PlanError, UserError
from ...console.log import get_logger
from ...dataplane.order.plan import Plan
from ...dataplane.order.stream import Stream
from ...dataplane.runlog import ledger
from ...dataplane.runlog.decisions import PLAN, load_run_plan
from ...dataplane.storage import storage
from ..mixture_file.mixture import After
from ..mixture_file.tolerant_read import read
from .branch_point import BranchPoint, open_branch_point
from .open_sources import OpenedSource
from .resolve_mixture import resolve_with_sources

log = get_logger(__name__)


@dataclass(frozen=True)
class OpenedPlan:
    """A plan as a stream, and its run, if any."""

    stream: Stream
    run: str | None = None
    """Folder or URL of the run; None for a mixture or a saved plan."""
    sources: Mapping[str, OpenedSource] = field(default_factory=dict)
    """Datasets by source; empty for a saved plan, which opens none."""

    @cached_property
    def branch(self) -> BranchPoint | None:
        """The continued run; None if there is none, or it cannot be read."""
        parent = self.plan.parent
        if parent is None:
            return None
        try:
            branch = open_branch_point(After(run=parent.run, step=self.plan.first_step))
            if (branch.plan.hash, branch.row) != (parent.hash, parent.row):
                raise PlanError(f"the run {parent.run} has another plan now")
            return branch
        except UserError as error:
            log.warning("cannot show what the plan inherits: %s", error.message)
            return None

    @property
    def plan(self) -> Plan:
        return self.stream.plan

    @cached_property
    def ledger(self) -> str | None:
        """Path of the run's ledger; None if there is none yet."""
        file = storage.join(self.run, ledger.NAME) if self.run else None
        return file if file and storage.exists(file) else None


def open_plan(name: str, overrides: Sequence[str] = ()) -> OpenedPlan:
    """Resolve a mixture YAML, or load a saved plan or the plan of a run, from any URL."""
    run = name if _is_folder(name) else None
    if run and not storage.exists(storage.join(run, PLAN)):
        hint = f"give a mixture YAML, a {PLAN} or the folder of a run"
        raise PlanError(f"there is no {PLAN} in the folder {run}", hint=hint)
    if not run and not name.endswith(".json"):
        stream, sources = resolve_with_sources(read(name, overrides))
        return OpenedPlan(stream, sources=sources)
    if overrides:
        problem = ConfigProblem(
            overrides[0].partition("=")[0],
            "a saved plan cannot be overridden; override its mixture",
            typed=True,
        )
        raise ConfigError("the overrides on the command line", [problem])
    return OpenedPlan(Stream(load_run_plan(run) if run else Plan.load(name)), run=run)


def _is_folder(name: str) -> bool:
    if storage.is_local(name):
        return storage.local_path(name).is_dir()
    return not name.endswith((".json", ".yaml", ".yml"))
