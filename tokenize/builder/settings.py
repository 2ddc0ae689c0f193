"""Settings shared by a build's tasks, and the layout of its work folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...dataplane.datasets.manifest import TokenizerInfo
from ...dataplane.storage import storage
from ..corpus.decontaminate import StoredEvaluations
from ..corpus.drop_list import StoredDrops
from ..corpus.filters import Filter
from ..corpus.genome import Genome
from ..sources.format import SourceConfig
from .fim import FimConfig

VERSION = 1
"""Version of tasks' output. A change gives all tasks new ids, so old results are not reused."""
WORK = "work"
"""Folder next to a dataset, for unfinished work."""
LOCKS = "claims"
"""Folder in WORK for builds' lock files (lock.py)."""
TASKS, DIGESTS, DROPS, SPILLS = "tasks", "digests", "drops", "spills"
"""Other folders in WORK: states of tasks (task_state.py), digests of documents and numbers of
duplicates (dedup.py), and documents to shuffle (shuffle.py)."""
FOLDERS = ("", "shards", "fields", "tables", "tokenizers")
"""A dataset's folders."""
SPLIT_NAME = re.compile(r"[A-Za-z0-9_-]+")


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """Settings shared by all tasks in a build."""

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
    """How many buckets this generation has, if it is shuffled through buckets."""
    dedup: bool = False
    drops: StoredDrops | None = None
    """Documents to leave out."""
    filter: Filter | None = None
    """Function that decides which documents stay."""
    evaluations: StoredEvaluations | None = None
    """Evaluations that documents must not contain."""
    genome: Genome | None = None
    """How sequences become documents."""
    fim: FimConfig | None = None
    """How documents are rearranged for fill-in-the-middle."""

    @property
    def cuts(self) -> bool:
        """Return True if a corpus document may be cut into several before it is tokenized."""
        cuts = self.evaluations is not None and self.evaluations.action == "cut"
        return cuts or self.genome is not None

    @property
    def masks(self) -> bool:
        """Return True if some tokens are not learnt."""
        return self.source.chat is not None and self.source.chat.learn != "all"

    @property
    def outputs(self) -> tuple[str, ...]:
        """The datasets' names."""
        return output_names(name for name, _ in self.splits)

    @property
    def spill_size(self) -> int:
        """Bytes of tokens after which a task writes a shard or a spill."""
        return self.shard_size if self.shuffle_memory is None else self.shuffle_memory // 4

    def identity(self) -> dict[str, Any]:
        """Return the settings that decide a task's bytes, except the input. Task ids hash them and
        manifests store them."""
        settings, chat = asdict(replace(self, genome=None)), self.source.chat
        for key in ("url", "tokenizer_files", "drops", "evaluations", "buckets", "genome"):
            del settings[key]
        del settings["source"]["chat"]
        return {
            **settings,
            **({} if self.genome is None else {"genome": self.genome.identity}),
            "chat": chat and chat.identity,
            "drop": self.drops and self.drops.digest,
            "filter": self.filter and self.filter.identity,
            "decontaminate": self.evaluations and self.evaluations.identity,
            "tokenizer": [self.tokenizer.kind, self.tokenizer.fingerprint, self.tokenizer.spec],
            "version": VERSION,
        }


def output_names(splits: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a build's datasets: the splits, or a single empty name."""
    names = tuple(sorted(splits))
    return ("train", *names) if names else ("",)


def dataset_url(url: str, output: str) -> str:
    return storage.join(url, output) if output else url


def work_url(url: str, *names: str) -> str:
    return storage.join(url, WORK, *names)


def check_splits(splits: Mapping[str, float]) -> None:
    """Raise ValueError for an invalid fraction, or a name that is another folder of a build."""
    for name in splits:
        if name == "train":
            raise ValueError("`train` is the name of the rest, which no split gets")
        if not SPLIT_NAME.fullmatch(name):
            raise ValueError(f"a split's name has letters, digits, - and _ only, not `{name}`")
        if name in (WORK, *FOLDERS):
            raise ValueError(f"a split cannot be called `{name}`: a build has such a folder")
    if any(not 0 < fraction < 1 for fraction in splits.values()) or sum(splits.values()) >= 1:
        raise ValueError("splits are fractions between 0 and 1, and their sum must be less than 1")
