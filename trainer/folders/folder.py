"""A run's folder: its layout and its exclusive lock.

    run.yaml model.yaml mixture.yaml plan.json      the resolved run
    about.json                                      parameters, layers, schedule, counted
    layout.yaml measured.json                       its layout plan; measured beside predicted
    metrics.jsonl ledger.jsonl events.jsonl         what each step did
    decisions.jsonl steer.json                      shares that it decided; a request for such
    signals.jsonl                                   signals of watched steps, by layer
    documents.jsonl                                 each step's documents with the largest losses
    held-out-….json evaluations.jsonl               held-out rows and their losses
    scores.jsonl recall.jsonl                       scores of checkpoints
    checkpoints/ logs/ profiles/ tensorboard/ board/
    slurm.sh report.html notes.yaml

Names inside these subfolders belong to the modules that write them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

from ...console.errors import BusyError, RunError, StorageError, file_fault
from ...console.explain import path_hint
from ...dataplane.runlog import decisions, document_losses, ledger
from ...dataplane.runlog.reader import METRICS
from ...dataplane.storage.atomic import HALF_WRITTEN

RUN = "run.yaml"
MODEL = "model.yaml"
MIXTURE = "mixture.yaml"
PLAN = "plan.json"
LAYOUT = "layout.yaml"
MEASURED = "measured.json"
ABOUT = "about.json"
EVENTS = "events.jsonl"
ATTESTED = "kernels"
"""Kind of event that records the attestation of a start's kernels."""
STEERED, NOT_STEERED = "steer", "steer refused"
"""Kinds of events: a decision about shares, and one that the run does not make."""
EVALUATIONS = "evaluations.jsonl"
SIGNALS = "signals.jsonl"
SCORES = "scores.jsonl"
RECALL = "recall.jsonl"
NOTES = "notes.yaml"
"""Tags and a note, which a person writes: by hand, or on the live page."""
CHECKPOINTS = "checkpoints"
LOGS = "logs"
PROFILES = "profiles"
TENSORBOARD = "tensorboard"
BOARD = "board"
"""The curves' levels of detail, for the live page."""
REPORT = "report.html"
COMPARISON = "compare.html"
SLURM_SCRIPT = "slurm.sh"
SLURM_LOG = "slurm-%j.out"
"""A batch job's log in `logs/`; sbatch inserts the job's number."""
SLURM_NOTE = "slurm-{job}.note"
"""State of the current start of a batch job, in `logs/`: `saved 500`."""
LOCK = ".lock"
REQUESTS = {
    "anneal.json": "trainer anneal",
    "tune.json": "trainer tune",
    "hybrids.json": "headrace compare-hybrids",
    "start.json": "headrace start",
}
"""Files that mark a folder as a request for several runs, and its command (request_folder.py)."""
FEW = 3
"""Runs that an error names."""
PROBE = ".probe-"
ORPHANS_END = 10.0
"""Seconds in which a killed launcher's ranks end."""


class RunFolder:
    """A run's files, and its lock."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self.run = self.root / RUN
        self.model = self.root / MODEL
        self.mixture = self.root / MIXTURE
        self.plan = self.root / PLAN
        self.layout = self.root / LAYOUT
        self.measured = self.root / MEASURED
        self.about = self.root / ABOUT
        self.metrics = self.root / METRICS
        self.ledger = self.root / ledger.NAME
        self.events = self.root / EVENTS
        self.decisions = self.root / decisions.NAME
        self.evaluations = self.root / EVALUATIONS
        self.signals = self.root / SIGNALS
        self.documents = self.root / document_losses.NAME
        self.scores = self.root / SCORES
        self.recall = self.root / RECALL
        self.checkpoints = self.root / CHECKPOINTS
        self.logs = self.root / LOGS
        self.profiles = self.root / PROFILES
        self.tensorboard = self.root / TENSORBOARD
        self.report = self.root / REPORT
        self.comparison = self.root / COMPARISON
        self.slurm = self.root / SLURM_SCRIPT

    @property
    def records(self) -> tuple[Path, ...]:
        """Files that a resume truncates to its checkpoint."""
        return self.metrics, self.ledger, self.evaluations, self.signals, self.documents

    def held_out(self, digest: str) -> Path:
        """Return the held-out rows' file; `digest` hashes the settings that choose the rows."""
        return self.root / f"held-out-{digest}.json"

    @property
    def begun(self) -> bool:
        """True if the folder holds a run. A person or a recipe may have written run.yaml alone."""
        from_starts = (self.checkpoints, self.logs, self.about, self.metrics, self.events)
        return self.run.exists() and any(path.exists() for path in from_starts)

    def check_is_run(self) -> None:
        if not self.begun:
            raise RunError(f"there is no run in {self.root}{self.request}", hint=self.hint)

    @property
    def request(self) -> str:
        """Words for errors: the request whose folder this is; empty if it is none."""
        names = [name for name in REQUESTS if (self.root / name).exists()]
        return f": it is the folder of a `{REQUESTS[names[0]]}`" if names else ""

    @property
    def hint(self) -> str:
        """Hint for a folder without a run: runs below it, or the nearest path."""
        below = [*self.root.glob("*/" + RUN), *self.root.glob("*/*/" + RUN)]
        runs = [str(path.parent) for path in sorted(below) if RunFolder(path.parent).begun]
        if not runs:
            return path_hint(self.root, "name a folder that `trainer run … --out` has made")
        more = f", … ({len(runs):,} runs)" if len(runs) > FEW else ""
        return f"name a run in it: {', '.join(runs[:FEW])}{more}"

    def check_free(self) -> None:
        """Raise if the folder holds anything but a run, or what a start left that was killed before
        its run began."""
        if self.root.is_dir() and not self.begun:
            unknown = [path.name for path in self.root.iterdir() if not self._is_from_start(path)]
            if unknown:
                raise RunError(
                    f"{self.root} holds other files ({', '.join(sorted(unknown)[:3])}) and no run",
                    hint="choose another --out",
                )

    def _is_from_start(self, path: Path) -> bool:
        """Return True for files that a start writes before run.yaml.

        `Job.save` writes run.yaml last: without it, no step was taken.
        """
        if path in (self.checkpoints, self.logs):  # a batch job opens its log before it starts
            log = SLURM_LOG.partition("%")[0]
            return all(file.name.startswith(log) for file in path.iterdir())
        written = (self.model, self.mixture, self.plan, self.layout, self.slurm)
        temporary = tuple(f".{file.name}." for file in (*written, self.run))
        return path in written or path.name == LOCK or path.name.startswith((PROBE, *temporary))

    def prepare(self) -> None:
        """Create the folder, and check that it is writable."""
        probe = self.root / f"{PROBE}{uuid.uuid4().hex[:8]}"
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
            self.logs.mkdir(exist_ok=True)
            probe.write_bytes(b"headrace")
            probe.unlink(missing_ok=True)  # the holder of the lock may have cleared it already
        except OSError as error:
            raise StorageError(
                f"cannot write to the run's folder {self.root}: {file_fault(error)[0]}",
                hint="choose another --out, or fix its permissions",
            ) from None

    def clear(self) -> None:
        """Remove half-written files that killed starts left."""
        for path in self.root.iterdir():
            if HALF_WRITTEN.fullmatch(path.name) or path.name.startswith(PROBE):
                path.unlink(missing_ok=True)

    @property
    def holder_has_ended(self) -> bool:
        """True if the lock's last holder ran on this machine and has ended."""
        lock = self.root / LOCK
        return lock.exists() and _has_ended(lock.read_text().strip())

    @contextlib.contextmanager
    def locked(self, orphan_seconds: float = ORPHANS_END) -> Iterator[int]:
        """Hold the folder's lock, and yield its descriptor.

        The lock belongs to the open file: it ends with the last process that inherited the
        descriptor. Ranks whose launcher was killed have `orphan_seconds` to end.
        """
        descriptor = os.open(self.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock(descriptor, orphan_seconds)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
            yield descriptor
        finally:
            os.close(descriptor)

    def _lock(self, descriptor: int, orphan_seconds: float) -> None:
        """Lock the open file; wait for ranks whose launcher was killed, which end at once."""
        deadline = time.monotonic() + orphan_seconds
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                holder = os.pread(descriptor, 100, 0).decode().strip()
            if not _has_ended(holder):
                user = holder or "another process"
                hint = "wait until it has ended, or choose another --out"
            elif time.monotonic() > deadline:
                user = f"ranks that {holder} started; that process has ended"
                hint = f"end them: `fuser {self.root / LOCK}` prints their process ids"
            else:
                time.sleep(0.1)
                continue
            raise BusyError(f"{self.root} is in use by {user}", hint=hint)


def _has_ended(holder: str) -> bool:
    """Return True if the lock names a process on this machine that has ended."""
    match = re.fullmatch(r"process (\d+) on (.+)", holder)
    if match is None or match[2] != os.uname().nodename:
        return False
    try:
        os.kill(int(match[1]), 0)
    except OSError as error:
        return error.errno == errno.ESRCH
    return False
