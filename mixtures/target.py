"""What a command is pointed at: a mixture YAML, a plan that was saved, or a run's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..console.errors import ConfigError, PlanError, Problem
from ..dataplane import ledger
from ..dataplane.plan import Plan
from ..dataplane.stream import Stream
from .branch import PLAN, Branch
from .resolve import read, resolve_whole


@dataclass(frozen=True)
class Target:
    stream: Stream
    branch: Branch | None = None
    """What the plan continues; known where it was made from a YAML."""
    run: Path | None = None
    """The run's folder, where it is one."""

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
    resolved = resolve_whole(*read(path, overrides), source=name)
    return Target(resolved.stream, resolved.branch)
