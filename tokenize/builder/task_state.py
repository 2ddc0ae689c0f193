"""State of a task, saved in work/tasks: its finished shards, and what it read."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from ...dataplane.datasets.manifest import Shard
from ...dataplane.storage import storage
from ...dataplane.storage.sealed import sealed, unsealed
from ...dataplane.storage.verified import read_checked
from ..corpus.read_stats import ReadStats
from .settings import TASKS, work_url

RUN_TASK_AGAIN = "remove the file and run the same command again: its task is run again"


@dataclass
class OutputState:
    """Finished work of a task for one dataset."""

    shards: list[Shard] = field(default_factory=list)
    next: int = 0
    """Number of the first document that is not handled: those before it are in finished shards,
    or do not belong to this dataset."""
    split: int = 0
    """Documents in finished shards that were split because of their length."""


@dataclass
class TaskState:
    """State of one task. `save` and `load` define the format of its file in work/tasks."""

    outputs: dict[str, OutputState]
    stats: ReadStats = field(default_factory=ReadStats)
    untokenizable: dict[str, str] = field(default_factory=dict)
    """Documents without ids, by their number in the task, and the reason."""
    done: bool = False

    def save(self, url: str, task: str) -> None:
        outputs = {name: asdict(output) for name, output in self.outputs.items()}
        for output in outputs.values():
            for shard in output["shards"]:
                shard["chunks"] = base64.b64encode(shard["chunks"]).decode()
        data = {
            "outputs": outputs,
            "counts": self.stats.counts,
            "problems": self.stats.problems,
            "notes": self.stats.notes,
            "untokenizable": self.untokenizable,
            "done": self.done,
        }
        storage.write(_state_url(url, task), sealed(data))

    @staticmethod
    def load(url: str, task: str, outputs: Sequence[str]) -> TaskState:
        """Return the saved state of a task, or an empty one."""
        where = _state_url(url, task)
        if not storage.exists(where):
            return TaskState({name: OutputState() for name in outputs})
        data = read_checked(where, lambda text: unsealed(where, text, hint=RUN_TASK_AGAIN))
        loaded = {}
        for name, output in data["outputs"].items():
            shards = [
                Shard(**{**shard, "chunks": base64.b64decode(shard["chunks"])})
                for shard in output["shards"]
            ]
            loaded[name] = OutputState(**{**output, "shards": shards})
        return TaskState(
            outputs=loaded,
            stats=ReadStats(Counter(data["counts"]), data["problems"], data["notes"]),
            untokenizable=data["untokenizable"],
            done=data["done"],
        )

    @staticmethod
    def delete(url: str, task: str) -> None:
        storage.delete(_state_url(url, task))


@dataclass(frozen=True)
class TaskEvent:
    """Progress of a running task since its previous event."""

    task: str
    bytes: int = 0
    documents: int = 0
    tokens: int = 0
    files: int = 0
    done: bool = False


def _state_url(url: str, task: str) -> str:
    return work_url(url, TASKS, f"{task}.json")
