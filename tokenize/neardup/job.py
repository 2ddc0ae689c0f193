"""Settings of a search for near-duplicates, and the files of its work folder.

A task writes its results into files that are named by their content, and then a state that lists
them. A state that exists belongs to a finished task, which is not run again.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

from ...dataplane.storage import storage
from ...dataplane.storage.sealed import sealed, unsealed
from ...dataplane.storage.verified import read_checked
from ..builder.task_state import RUN_TASK_AGAIN
from ..sources.format import SourceConfig
from .lsh import LshConfig
from .signatures import rensa

VERSION = 1
"""Version of the results of tasks."""
STATES, PARTS = "states", "parts"
"""Folders in the work folder: states of tasks, and their results."""


@dataclass(frozen=True, kw_only=True)
class TaskSizes:
    """How much of a corpus a task holds in memory. The list of duplicates does not depend on it."""

    segment_bytes: int = 1 << 30
    """Bytes of the corpus for each segment of the keys."""
    part_documents: int = 1 << 18
    """Documents of a part, at most."""
    pair_entries: int = 8 << 20
    """Entries that a task compares at once, if one segment has no more: about 500 MB."""


@dataclass(frozen=True, kw_only=True)
class NeardupJob:
    """Settings of all tasks."""

    work: str
    """URL of the work folder."""
    source: SourceConfig
    skip_bad: bool
    lsh: LshConfig
    segments: int
    """Ranges of keys in which a part is read."""
    sizes: TaskSizes

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the results."""
        return {
            "source": asdict(self.source),
            "skip_bad": self.skip_bad,
            **asdict(self.lsh),
            "segments": self.segments,
            "minhash": f"rensa {rensa().ALGORITHM_VERSION}",
            "version": VERSION,
        }


def task_id(job: NeardupJob, *inputs: Any) -> str:
    """Return a hash of all that decides the result of a task."""
    text = json.dumps([job.identity(), *inputs], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def save_state(job: NeardupJob, task: str, state: dict[str, Any]) -> None:
    storage.write(_url(job, task), sealed(state))


def load_state(job: NeardupJob, task: str) -> dict[str, Any] | None:
    """Return the state of a finished task, or None."""
    where = _url(job, task)
    if not storage.exists(where):
        return None
    return read_checked(where, lambda text: unsealed(where, text, hint=RUN_TASK_AGAIN))


def finished(job: NeardupJob, task: str) -> dict[str, Any]:
    state = load_state(job, task)
    assert state is not None
    return state


def _url(job: NeardupJob, task: str) -> str:
    return storage.join(job.work, STATES, f"{task}.json")
