"""Shard formats, found by name.

A format does three things: it writes documents into one file, it says where in the file the
tokens lie (its layout), and it gives back where a document came from. Reading, caching and
verifying bytes is not its business: it is handed a function that reads a range.

To add one: write a file beside this one, and add it to FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from ...console.errors import InputError

Reader = Callable[[int, int], bytes]
"""Reads the bytes [start, end) of a shard."""

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Origin:
    """Where a document came from: its file, its place in it (line, row or record; from 0), and
    the user's own id where there is one."""

    file: str
    position: int
    id: str | None = None


@dataclass(frozen=True)
class Document:
    """One tokenized document, its end-of-document id included."""

    tokens: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
    origin: Origin
    weights: npt.NDArray[np.uint8] | None = None
    """A code for each token into the dataset's palette of loss weights."""


@dataclass(frozen=True)
class Layout:
    """Where the tokens of a shard lie in its file.

    A shard is a sequence of runs: tokens that lie side by side. Run k holds tokens
    [run_tokens[k], run_tokens[k + 1]) at byte run_bytes[k]; their weight codes, one byte each,
    at weight_bytes[k].
    """

    document_starts: Int64
    """Token offsets of the documents, and after the last one: documents + 1 values."""
    run_tokens: Int64
    run_bytes: Int64
    weight_bytes: Int64 | None = None


class Writer(Protocol):
    """Writes documents into the file it was made for."""

    def add(self, document: Document) -> None: ...

    def finish(self) -> None: ...


class Format(Protocol):
    """What each module of this folder provides, as functions."""

    def writer(self, out: BinaryIO, *, dtype: str, weighted: bool) -> Writer:
        """Start a shard. `out` is written strictly forward."""
        ...

    def layout(self, read: Reader, size: int, *, dtype: str, details: dict[str, object]) -> Layout:
        """Find the tokens of a shard, reading as little of it as possible."""
        ...

    def origins(
        self, read: Reader, size: int, first: int, last: int, *, details: dict[str, object]
    ) -> list[Origin]:
        """Where the documents [first, last) of a shard came from."""
        ...


FORMATS = {
    "arrow": "headrace.dataplane.shards.arrow",
    "mds": "headrace.dataplane.shards.mds",
}


def shard_format(name: str) -> Format:
    """The format called `name`."""
    if name not in FORMATS:
        raise InputError(f"there is no shard format `{name}`", mend=f"known: {', '.join(FORMATS)}")
    module: Format = import_module(FORMATS[name])
    return module
