"""The interface of a shard format.

A format writes documents into one file, locates the tokens in such a file, and returns where each
document came from. It neither verifies nor caches: callers pass a function that reads a range.
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
"""Reads the bytes [start, end) of a shard."""

PADDING = -1
"""In place of the byte of a run: its tokens are padding, which has no bytes."""


@dataclass(frozen=True)
class ShardLayout:
    """Locations of the tokens of a shard in its file.

    A shard is a sequence of runs of contiguous tokens. Run k holds the tokens
    [run_tokens[k], run_tokens[k + 1]) at byte run_bytes[k]; their weight codes, one byte each,
    at weight_bytes[k].
    """

    document_starts: Int64
    """Token offsets of the documents, then the number of tokens: documents + 1 values."""
    run_tokens: Int64
    run_bytes: Int64
    weight_bytes: Int64 | None = None
    padding: Int64 | None = None
    """Of a packed view: the tokens [low, high) of each padding, which ends where the next document
    begins."""

    @property
    def document_tokens(self) -> Int64:
        """The length of each document."""
        lengths: Int64 = np.diff(self.document_starts)
        if self.padding is not None:
            before = np.searchsorted(self.document_starts, self.padding[:, 0]) - 1
            lengths[before] -= self.padding[:, 1] - self.padding[:, 0]
        return lengths


class StoredShard(Protocol):
    """Names, sizes and the document count of a shard, as its manifest lists them."""

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
    """Bytes of the (uncompressed) file."""
    dtype: str
    """Type of its ids."""
    details: dict[str, object]
    """`Shard.details`: what the format needs to read the file."""
    stored_name: str | None = None
    """The compressed file, if the shard is compressed."""
    stored_size: int | None = None


class ShardFormat(ABC):
    """A shard format. The defaults are those of a format that is a set of shard files alone."""

    compressible: ClassVar[bool] = False
    """True if `tokenize build` may compress the shards with zstd."""
    index_name: ClassVar[str | None] = None
    """File beside the manifest that lists the shards for other readers of the format."""
    external_files: ClassVar[str] = ""
    """Files by which a folder of another program is recognised; empty: it cannot be indexed."""
    index_options: ClassVar[tuple[str, ...]] = ()
    """Options of `tokenize index` that the format uses: `column`, `dtype`."""

    @abstractmethod
    def layout(
        self, read: Reader, size: int, *, dtype: str, details: dict[str, object]
    ) -> ShardLayout:
        """Locate the tokens of a shard, reading as little of it as possible."""

    @abstractmethod
    def origins(
        self, read: Reader, size: int, first: int, last: int, *, details: dict[str, object]
    ) -> list[DocumentOrigin]:
        """Return where the documents [first, last) of a shard came from."""

    def write(self, out: BinaryIO, documents: ShardDocuments) -> None:
        """Write a whole shard, strictly forward. Equal documents must give equal bytes.

        A format that is not `writable` in FORMATS has no such method."""
        raise NotImplementedError

    def index(
        self,
        shards: Sequence[StoredShard],
        *,
        dtype: str,
        weighted: bool,
        compression: str | None,
    ) -> bytes:
        """Return the content of the file `index_name`."""
        raise NotImplementedError

    def index_problem(self, folder: Path, shards: Sequence[StoredShard]) -> str | None:
        """Return what is wrong with the file `index_name` of a local dataset, or None."""
        raise NotImplementedError

    def recognises(self, names: Sequence[str]) -> bool:
        """Return True if a folder with files of these names holds a dataset of this format."""
        return False

    def external_shards(self, url: str, column: str, dtype: str | None) -> Iterator[ExternalShard]:
        """List the shards of a dataset that another program wrote. `dtype` is the type of the ids
        where the format does not record it."""
        raise NotImplementedError
