"""A run's folder: what belongs in it, whose it is, and that one run at a time has it.

run.yaml model.yaml mixture.yaml plan.json     what runs, resolved
metrics.jsonl ledger.jsonl events.jsonl        what ran
held-out-….json evaluations.jsonl              the rows that are held out, and what they came to
checkpoints/ tensorboard/ profiles/ logs/ report.html
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..console import config as reader
from ..console.errors import BusyError, RunError, StorageError
from ..dataplane.runlog import ledger
from ..dataplane.runlog.reader import METRICS
from ..dataplane.storage.atomic import HALF_WRITTEN
from .cluster.slurm import SCRIPT
from .record.steps import EVALUATIONS, EVENTS

RUN = "run.yaml"
MODEL = "model.yaml"
MIXTURE = "mixture.yaml"
PLAN = "plan.json"
CHECKPOINTS = "checkpoints"
LOGS = "logs"
PROFILES = "profiles"
REPORT = "report.html"
LOCK = ".lock"
PROBE = ".probe-"


class RunFolder:
    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.run = self.root / RUN
        self.model = self.root / MODEL
        self.mixture = self.root / MIXTURE
        self.plan = self.root / PLAN
        self.checkpoints = self.root / CHECKPOINTS
        self.logs = self.root / LOGS
        self.slurm = self.root / SCRIPT
        self.profiles = self.root / PROFILES
        self.report = self.root / REPORT
        self.metrics = self.root / METRICS
        self.ledger = self.root / ledger.NAME
        self.events = self.root / EVENTS
        self.evaluations = self.root / EVALUATIONS

    @property
    def begun(self) -> bool:
        """Whether a run lives here."""
        return self.run.exists()

    def check_is_run(self) -> None:
        if not self.begun:
            raise RunError(
                f"there is no run in {self.root}",
                hint="name a folder that `trainer run … --out` has made",
            )

    def check_free(self) -> None:
        """A new run may take the folder if it does not exist, or holds nothing, or nothing but
        what a run leaves behind that died before it began."""
        if self.root.is_dir() and not self.begun:
            others = [path.name for path in self.root.iterdir() if not self._left_behind(path)]
            if others:
                raise RunError(
                    f"{self.root} holds other things ({', '.join(sorted(others)[:3])}) and no run",
                    hint="choose another --out",
                )

    def _left_behind(self, path: Path) -> bool:
        """`Job.save` writes run.yaml last: a run without it has taken no step."""
        if path in (self.checkpoints, self.logs):  # a batch job says something there first
            return all(each.name.startswith("slurm-") for each in path.iterdir())
        written = (self.model, self.mixture, self.plan, self.slurm)
        half = tuple(f".{file.name}." for file in (*written, self.run))
        return path in written or path.name == LOCK or path.name.startswith((PROBE, *half))

    def prepare(self) -> None:
        """Make the folder, and find out now whether it can be written to."""
        probe = self.root / f"{PROBE}{uuid.uuid4().hex[:8]}"
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            probe.write_bytes(b"headrace")
            probe.unlink(missing_ok=True)  # who holds the folder clears it
        except OSError as error:
            raise StorageError(
                f"cannot write to the run's folder {self.root}: {error.strerror}",
                hint="choose another --out, or fix its permissions",
            ) from None

    def clear(self) -> None:
        """Remove what was half written when a start of the run was killed."""
        for path in self.root.iterdir():
            if HALF_WRITTEN.fullmatch(path.name) or path.name.startswith(PROBE):
                path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """Hold the folder. The lock is the open file's: it dies with the last process."""
        descriptor = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                holder = os.pread(descriptor, 100, 0).decode().strip() or "another process"
                raise BusyError(
                    f"{self.root} is in use by {holder}",
                    hint="wait until it has ended, or choose another --out",
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)


def differences(stored: Any, wanted: Any, path: str = "") -> list[str]:
    """Where two configurations differ, in words: `optimizer.lr: 0.001 there, 0.002 here`."""
    stored, wanted = reader.plain(stored), reader.plain(wanted)
    if isinstance(stored, dict) and isinstance(wanted, dict):
        found = []
        for key in [*stored, *(key for key in wanted if key not in stored)]:
            inner = f"{path}.{key}" if path else str(key)
            found += differences(stored.get(key), wanted.get(key), inner)
        return found
    if stored == wanted:
        return []
    return [f"{path}: {stored!r} there, {wanted!r} here"]
