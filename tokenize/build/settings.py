"""A build's settings, and where it keeps what it has not finished."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from ...dataplane.datasets.manifest import TokenizerInfo
from ...dataplane.storage import storage
from ..sources import SourceConfig

VERSION = 3
"""Changes when the same input would give other bytes: older tasks are not reused then."""
WORK = "work"
"""The folder beside a dataset that holds what is not finished."""
CLAIMS = "claims"
"""The folder in it where builds say that they are at work."""
TASKS, DIGESTS, DROPS, SPILLS = "tasks", "digests", "drops", "spills"
"""The other folders in it: what tasks have noted and finished (records.py), what is known of
duplicates (dedup.py), and what is to be shuffled (shuffle.py)."""


@dataclass(frozen=True, kw_only=True)
class BuildJob:
    """What all tasks of a build share."""

    url: str
    format: str
    compression: str | None
    shard_size: int
    source: SourceConfig
    tokenizer: TokenizerInfo
    tokenizer_files: dict[str, bytes]
    """What its manifest entry refers to."""
    splits: tuple[tuple[str, float], ...] = ()
    max_document_tokens: int | None = None
    skip_bad: bool = False
    seed: int | None = None
    """Of the shuffle; None: documents stay in the order of the corpus."""
    dedup: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of the datasets that are built: one without a name, or the splits."""
        return ("train", *(name for name, _ in self.splits)) if self.splits else ("",)

    def identity(self) -> dict[str, Any]:
        """What decides the bytes of a task, besides its input."""
        settings = asdict(self)
        for key in ("url", "tokenizer", "tokenizer_files"):
            del settings[key]
        tokenizer = [self.tokenizer.kind, self.tokenizer.fingerprint, self.tokenizer.spec]
        return {**settings, "tokenizer": tokenizer, "version": VERSION}


def dataset_url(url: str, output: str) -> str:
    return storage.join(url, output) if output else url


def work_url(url: str, *names: str) -> str:
    return storage.join(url, WORK, *names)
