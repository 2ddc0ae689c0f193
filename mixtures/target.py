"""What a command is pointed at: a mixture YAML, a plan that was saved, or a run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ..console.errors import ConfigError, PlanError, Problem, UserError
from ..console.log import get_logger
from ..dataplane import ledger
from ..dataplane.plan import Plan
from ..dataplane.stream import Stream
from .branch import PLAN, Branch, open_branch
from .draft import read
from .resolve import resolve_draft
from .spec import After

log = get_logger(__name__)


@dataclass(frozen=True)
class Target:
    stream: Stream
    run: Path | None = None
    """The run's folder, where it is one."""

    @cached_property
    def branch(self) -> Branch | None:
        """What the plan continues, if it does and that can still be read."""
        parent = self.plan.parent
        if parent is None:
            return None
        try:
            branch = open_branch(After(run=parent.run, step=self.plan.first_step))
            if (branch.plan.hash, branch.row) != (parent.hash, parent.row):
                raise PlanError(f"the run {parent.run} follows another plan now")
            return branch
        except UserError as error:
            log.warning("what the plan inherits is not shown: %s", error.what)
            return None

    @property
    def plan(self) -> Plan:
        return self.stream.plan

    @property
    def ledger(self) -> Path | None:
        """The run's ledger, if it has one yet."""
        file = self.run / ledger.NAME if self.run else None
        return file if file and file.exists() else None


def open_target(name: str, overrides: Sequence[str] = ()) -> Target:
    """Resolve a YAML; load a plan, or the plan of a run."""
    path = Path(name)
    if path.is_dir() and not (path / PLAN).exists():
        raise PlanError(
            f"there is no plan in the folder {path}",
            mend="name a mixture YAML, a plan.json or the folder of a run",
        )
    if path.is_dir() or path.suffix == ".json":
        if overrides:
            problem = Problem(overrides[0].partition("=")[0], "a plan is fixed: change its mixture")
            raise ConfigError("the overrides on the command line", [problem])
        file = path / PLAN if path.is_dir() else path
        return Target(Stream(Plan.load(file)), run=path if path.is_dir() else None)
    return Target(resolve_draft(read(path, overrides)))
