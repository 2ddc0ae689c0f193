"""A task's state, saved in work/tasks: finished shards, and counts from reading."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from ...dataplane.datasets.manifest import Shard
from ...dataplane.storage import storage
from ...dataplane.storage.sealed import seal, unseal
from ...dataplane.storage.verified import read_checked
from ..corpus.read_stats import ReadStats
from .settings import TASKS, work_url

RUN_TASK_AGAIN = "remove the file and run the same command again: its task is run again"


@dataclass
class OutputState:
    """A task's finished work for one dataset."""

    shards: list[Shard] = field(default_factory=list)
    next: int = 0
    """Number of the first unhandled document: earlier ones are in finished shards, or do not belong
    to this dataset."""
    split: int = 0
    """Documents in finished shards that were split because they were too long."""


@dataclass
class TaskState:
    """One task's state. `save` and `load` define its file format in work/tasks."""

    outputs: dict[str, OutputState]
    stats: ReadStats = field(default_factory=ReadStats)
    untokenizable: dict[str, str] = field(default_factory=dict)
    """Reasons why documents have no ids, by number in the task."""
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
        storage.write(_state_url(url, task), seal(data))

    @staticmethod
    def load(url: str, task: str, outputs: Sequence[str]) -> TaskState:
        """Load a task's state, or return an empty one."""
        state_url = _state_url(url, task)
        if not storage.exists(state_url):
            return TaskState({name: OutputState() for name in outputs})
        data = read_checked(state_url, lambda text: unseal(state_url, text, hint=RUN_TASK_AGAIN))
        output_states = {}
        for name, output in data["outputs"].items():
            shards = [
                Shard(**{**shard, "chunks": base64.b64decode(shard["chunks"])})
                for shard in output["shards"]
            ]
            output_states[name] = OutputState(**{**output, "shards": shards})
        return TaskState(
            outputs=output_states,
            stats=ReadStats(Counter(data["counts"]), data["problems"], data["notes"]),
            untokenizable=data["untokenizable"],
            done=data["done"],
        )

    @staticmethod
    def delete(url: str, task: str) -> None:
        storage.delete(_state_url(url, task))


@dataclass(frozen=True)
class TaskEvent:
    """A running task's progress since its previous event."""

    task: str
    bytes: int = 0
    documents: int = 0
    tokens: int = 0
    files: int = 0
    done: bool = False


def _state_url(url: str, task: str) -> str:
    return work_url(url, TASKS, f"{task}.json")
