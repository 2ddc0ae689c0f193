"""Settings shared by the tasks of a build, and the layout of its work folder."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ...dataplane.datasets.manifest import TokenizerInfo
from ...dataplane.storage import storage
from ..corpus.decontaminate import StoredEvaluations
from ..corpus.drop_list import StoredDrops
from ..corpus.filters import Filter
from ..sources.format import SourceConfig
from .fim import FimConfig

VERSION = 1
"""Version of the task output. A change makes all task ids differ, so old tasks are not reused."""
WORK = "work"
"""Folder beside a dataset for unfinished work."""
LOCKS = "claims"
"""Folder in WORK for the lock files of builds (lock.py)."""
TASKS, DIGESTS, DROPS, SPILLS = "tasks", "digests", "drops", "spills"
"""Other folders in WORK: states of tasks (task_state.py), digests of documents and numbers of
duplicates (dedup.py), and documents to shuffle (shuffle.py)."""


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """Settings of all tasks of a build."""

    url: str
    format: str
    compression: str | None
    shard_size: int
    source: SourceConfig
    tokenizer: TokenizerInfo
    tokenizer_files: dict[str, bytes]
    """Files that the tokenizer's manifest entry refers to, by name."""
    splits: tuple[tuple[str, float], ...] = ()
    max_document_tokens: int | None = None
    skip_bad: bool = False
    seed: int | None = None
    """Seed of the shuffle; None: documents keep the order of the corpus."""
    shuffle_memory: int | None = None
    """Bytes of documents that a worker holds to shuffle through buckets; None: shuffle by shard."""
    buckets: int | None = None
    """Buckets of this generation, if it is shuffled through buckets."""
    dedup: bool = False
    drops: StoredDrops | None = None
    """Documents to leave out."""
    filter: Filter | None = None
    """Function that decides which documents stay."""
    evaluations: StoredEvaluations | None = None
    """Evaluations that documents must not contain."""
    fim: FimConfig | None = None
    """How documents are rearranged for fill-in-the-middle."""

    @property
    def cuts(self) -> bool:
        """Return True if several documents of the dataset may come from one of the corpus before it
        is tokenized."""
        return self.evaluations is not None and self.evaluations.action == "cut"

    @property
    def masks(self) -> bool:
        """Return True if some tokens of documents are not learnt."""
        return self.source.chat is not None and self.source.chat.learn != "all"

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the datasets."""
        return outputs_of(name for name, _ in self.splits)

    @property
    def spill_size(self) -> int:
        """Bytes of tokens after which a task writes what it has: a shard, or a spill."""
        return self.shard_size if self.shuffle_memory is None else self.shuffle_memory // 4

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide the bytes of a task, besides its input. Task ids hash
        them and manifests store them."""
        settings, chat = asdict(self), self.source.chat
        for key in ("url", "tokenizer_files", "drops", "evaluations", "buckets"):
            del settings[key]
        del settings["source"]["chat"]
        return {
            **settings,
            "chat": chat and chat.identity,
            "drop": self.drops and self.drops.digest,
            "filter": self.filter and self.filter.identity,
            "decontaminate": self.evaluations and self.evaluations.identity,
            "tokenizer": [self.tokenizer.kind, self.tokenizer.fingerprint, self.tokenizer.spec],
            "version": VERSION,
        }


def outputs_of(splits: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the datasets of a build: the splits, or one with an empty name."""
    names = tuple(sorted(splits))
    return ("train", *names) if names else ("",)


def dataset_url(url: str, output: str) -> str:
    return storage.join(url, output) if output else url


def work_url(url: str, *names: str) -> str:
    return storage.join(url, WORK, *names)
