"""Settings for a near-duplicate search, and the files in its work folder.

A task writes results into files named by their content, and then a state that lists them. If a
state exists, the task is finished and is not run again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from ...dataplane.storage import storage
from ...dataplane.storage.sealed import seal, unseal
from ...dataplane.storage.verified import read_checked
from ..builder.task_state import RUN_TASK_AGAIN
from ..sources.format import SourceConfig
from .lsh import LshConfig
from .signatures import import_rensa

VERSION = 1
"""Version of the tasks' results."""
STATES, PARTS = "states", "parts"
"""Folders in the work folder: tasks' states, and their results."""


@dataclass(frozen=True, kw_only=True)
class TaskSizes:
    """Corpus portion that a task holds in memory; it does not change the results."""

    segment_bytes: int = 1 << 30
    """Corpus bytes per segment of keys."""
    part_documents: int = 1 << 18
    """Upper bound on a part's documents."""
    pair_entries: int = 8 << 20
    """Entries compared at once, about 500 MB; more if a single segment has more."""


@dataclass(frozen=True, kw_only=True)
class NeardupJob:
    """Settings shared by all tasks."""

    work: str
    """Work folder URL."""
    source: SourceConfig
    skip_bad: bool
    lsh: LshConfig
    segments: int
    """Number of key ranges into which a band is split."""
    sizes: TaskSizes

    def identity(self) -> dict[str, Any]:
        """Return everything that decides the results, except the inputs."""
        return {
            "source": asdict(self.source),
            "skip_bad": self.skip_bad,
            **asdict(self.lsh),
            "segments": self.segments,
            "minhash": f"rensa {import_rensa().ALGORITHM_VERSION}",
            "version": VERSION,
        }


def task_id(job: NeardupJob, *inputs: Any) -> str:
    """Return a hash of everything that decides a task's result."""
    text = json.dumps([job.identity(), *inputs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def save_state(job: NeardupJob, task: str, state: dict[str, Any]) -> None:
    storage.write(_url(job, task), seal(state))


def load_state(job: NeardupJob, task: str) -> dict[str, Any] | None:
    """Load a task's state; None if the task is not finished."""
    url = _url(job, task)
    if not storage.exists(url):
        return None
    return read_checked(url, lambda text: unseal(url, text, hint=RUN_TASK_AGAIN))


def finished_state(job: NeardupJob, task: str) -> dict[str, Any]:
    state = load_state(job, task)
    assert state is not None
    return state


def _url(job: NeardupJob, task: str) -> str:
    return storage.join(job.work, STATES, f"{task}.json")
