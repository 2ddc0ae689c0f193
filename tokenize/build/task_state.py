"""What a task notes of itself: the shards it has finished, and what it counted."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from ...dataplane.datasets.manifest import Shard
from ...dataplane.storage import storage
from .settings import TASKS, work_url


@dataclass
class Output:
    """What a task has finished of one dataset."""

    shards: list[Shard] = field(default_factory=list)
    next: int = 0
    """How many of the task's documents lie in finished shards, or are of no concern to them."""
    split: int = 0
    """How many of those were longer than a document may be."""


@dataclass
class Record:
    """What is noted of a task in work/tasks: the shards it has finished, what it counted."""

    outputs: dict[str, Output]
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is no problem, but may surprise: texts that name special tokens."""
    untokenizable: dict[str, str] = field(default_factory=dict)
    """Documents that have no ids, by their number in the task: why."""
    done: bool = False

    @property
    def bad(self) -> int:
        """How many records could not be read, or have no ids."""
        return sum(count for name, count in self.counts.items() if name.startswith("bad: "))

    def save(self, url: str, task: str) -> None:
        outputs = {name: asdict(output) for name, output in self.outputs.items()}
        for output in outputs.values():
            for shard in output["shards"]:
                shard["chunks"] = base64.b64encode(shard["chunks"]).decode()
        data = {**vars(self), "outputs": outputs}
        storage.write(_place(url, task), json.dumps(data).encode())

    @staticmethod
    def load(url: str, task: str, outputs: Sequence[str]) -> Record:
        where = _place(url, task)
        if not storage.exists(where):
            return Record({name: Output() for name in outputs})
        data = json.loads(storage.read(where))
        found = {}
        for name, output in data["outputs"].items():
            shards = [
                Shard(**{**shard, "chunks": base64.b64decode(shard["chunks"])})
                for shard in output["shards"]
            ]
            found[name] = Output(**{**output, "shards": shards})
        return Record(**{**data, "outputs": found, "counts": Counter(data["counts"])})

    @staticmethod
    def forget(url: str, task: str) -> None:
        storage.delete(_place(url, task))


@dataclass(frozen=True)
class Event:
    """What a running task tells: what it has read and written since its last word."""

    task: str
    bytes: int = 0
    documents: int = 0
    tokens: int = 0
    files: int = 0
    done: bool = False


def _place(url: str, task: str) -> str:
    return work_url(url, TASKS, f"{task}.json")
