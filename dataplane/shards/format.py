"""The interface for shard formats.

A format writes documents into a file, locates tokens in such a file, and returns document origins.
It neither verifies nor caches: callers pass a function that reads a range.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, ClassVar, Protocol

import numpy as np

from ..arrays import Int64
from .documents import DocumentOrigin, ShardDocuments

Reader = Callable[[int, int], bytes]
"""Reads the bytes [start, end) from a shard."""

PADDING = -1
"""Byte offset of a padding run, which has no bytes."""


@dataclass(frozen=True)
class ShardLayout:
    """Token locations in a shard's file.

    A shard is a sequence of runs. Run k holds the contiguous tokens
    [run_tokens[k], run_tokens[k + 1]) at byte run_bytes[k], and their weight codes, a byte per
    token, at weight_bytes[k].
    """

    document_starts: Int64
    """[documents + 1] Token offset of each document, then the number of tokens."""
    run_tokens: Int64
    """[runs + 1]"""
    run_bytes: Int64
    """[runs] PADDING for padding runs."""
    weight_bytes: Int64 | None = None
    """[runs]"""
    padding: Int64 | None = None
    """[paddings, 2] In a packed view: token ranges [start, end), which end where the next document
    begins."""

    @property
    def document_tokens(self) -> Int64:
        """[documents] Document lengths, without padding."""
        lengths: Int64 = np.diff(self.document_starts)
        if self.padding is not None:
            documents = np.searchsorted(self.document_starts, self.padding[:, 0]) - 1
            lengths[documents] -= self.padding[:, 1] - self.padding[:, 0]
        return lengths


class StoredShard(Protocol):
    """A shard's names, sizes and document count, as the manifest lists them."""

    @property
    def name(self) -> str: ...
    @property
    def size(self) -> int: ...
    @property
    def documents(self) -> int: ...
    @property
    def stored_name(self) -> str | None: ...
    @property
    def stored_size(self) -> int | None: ...


@dataclass(frozen=True, kw_only=True)
class ExternalShard:
    """A shard that another program wrote, before it is indexed."""

    name: str
    """Relative to the dataset's URL."""
    size: int
    """Uncompressed bytes."""
    dtype: str
    """Type of the ids."""
    details: dict[str, object]
    """`Shard.details`: what the format needs to read the file."""
    stored_name: str | None = None
    """The compressed file, if the shard is compressed."""
    stored_size: int | None = None


class ShardFormat(ABC):
    """A shard format. The defaults fit a format with shard files only."""

    compressible: ClassVar[bool] = False
    """True if `tokenize build` may compress the shards with zstd."""
    index_name: ClassVar[str | None] = None
    """File beside the manifest that lists the shards for the format's standard reader."""
    external_files: ClassVar[str] = ""
    """Files that identify a folder written by another program; empty: none can be indexed."""
    index_options: ClassVar[tuple[str, ...]] = ()
    """Options that the format takes from `tokenize index`: `column`, `dtype`."""

    @abstractmethod
    def layout(
        self, read: Reader, size: int, *, dtype: str, details: dict[str, object]
    ) -> ShardLayout:
        """Locate a shard's tokens, reading as little as possible."""

    @abstractmethod
    def origins(
        self, read: Reader, size: int, first: int, end: int, *, details: dict[str, object]
    ) -> list[DocumentOrigin]:
        """Return the origins of a shard's documents [first, end)."""

    def write(self, out: BinaryIO, documents: ShardDocuments) -> None:
        """Write a shard, strictly forward. Equal documents must give equal bytes.

        Formats that are not `writable` in FORMATS lack this method."""
        raise NotImplementedError

    def index(
        self,
        shards: Sequence[StoredShard],
        *,
        dtype: str,
        weighted: bool,
        compression: str | None,
    ) -> bytes:
        """Return the content of `index_name`."""
        raise NotImplementedError

    def index_problem(self, folder: Path, shards: Sequence[StoredShard]) -> str | None:
        """Return what is wrong with a local dataset's `index_name`, or None."""
        raise NotImplementedError

    def recognises(self, names: Sequence[str]) -> bool:
        """Return True if a folder with these file names holds a dataset in this format."""
        return False

    def external_shards(self, url: str, column: str, dtype: str | None) -> Iterator[ExternalShard]:
        """List the shards that another program wrote. `dtype` is the type of the ids where the
        format does not record it."""
        raise NotImplementedError
