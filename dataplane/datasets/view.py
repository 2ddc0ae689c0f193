"""Views: datasets without tokens of their own, made of documents of another dataset.

    URL/manifest.json        names the other dataset and the expression that chooses its documents
    URL/tables/<hash>.arrow  shards of the other dataset, with the view's counts
    URL/views/<hash>.bits    for each shard, one bit for each of its documents

A shard of a view is a file of the other dataset under another layout: its runs are those of the
chosen documents. Order, rows, cache and hashes are therefore those of any dataset.
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...console.errors import IntegrityError
from ..arrays import Int64
from ..shards.format import ShardLayout
from ..storage import storage
from ..storage.verified import read_named
from .manifest import Manifest, Shard

FOLDER = "views"
KEY = "view"
"""Key of `Manifest.settings` and of `Shard.details`."""
AGAIN = "make the view again with `tokenize select`"


@dataclass(frozen=True)
class View:
    """The dataset whose documents a view has, and the expression that chose them."""

    url: str
    where: str


def view_of(url: str, manifest: Manifest) -> View | None:
    """Return what a dataset is a view of; None if it has tokens of its own."""
    entry = manifest.settings.get(KEY)
    if entry is None:
        return None
    of = str(entry["of"])
    if storage.is_local(of) and not of.startswith("/"):
        of = posixpath.normpath(storage.join(url, of))
    return View(of, str(entry["where"]))


@dataclass(frozen=True, eq=False)
class Selection:
    """The documents of a shard that a view has."""

    documents: Int64
    """Their numbers in the shard, ascending."""
    first: int
    """Number of the shard's first document in the other dataset."""

    def layout(self, whole: ShardLayout, width: int) -> ShardLayout:
        """Return the layout of the chosen documents, from that of the whole shard, whose ids have
        `width` bytes."""
        starts = whole.document_starts
        lengths = np.diff(starts)[self.documents]
        first, last = _spans(self.documents)
        low, high = starts[first], starts[last]
        filled = high > low
        low, high = low[filled], high[filled]
        # A span of tokens may cross runs: it is cut where they meet.
        runs = whole.run_tokens
        begin = np.searchsorted(runs, low, side="right") - 1
        count = np.searchsorted(runs, high, side="left") - begin
        owner = np.repeat(np.arange(len(low)), count)
        run = begin[owner] + np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
        start = np.maximum(low[owner], runs[run])
        end = np.minimum(high[owner], runs[run + 1])
        skipped = start - runs[run]
        weights = whole.weight_bytes
        return ShardLayout(
            document_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            run_tokens=np.concatenate([[0], np.cumsum(end - start)]).astype(np.int64),
            run_bytes=whole.run_bytes[run] + skipped * width,
            weight_bytes=None if weights is None else weights[run] + skipped,
        )


def selection_of(url: str, shard: Shard) -> Selection | None:
    """Return the documents that a view has of a shard; None for a shard of its own dataset."""
    entry = shard.details.get(KEY)
    if entry is None:
        return None
    bits = np.frombuffer(read_named(url, entry["bits"], hint=AGAIN), np.uint8)
    chosen = np.unpackbits(bits, count=min(entry["documents"], 8 * len(bits)), bitorder="little")
    documents = np.flatnonzero(chosen)
    if len(documents) != shard.documents:
        raise IntegrityError(
            f"{url} chooses {len(documents):,} documents of {shard.name}; its manifest says "
            f"{shard.documents:,}",
            hint=AGAIN,
        )
    return Selection(documents, entry["first"])


def bits_of(chosen: Any) -> bytes:
    """Return the content of a file of bits, from a boolean for each document of a shard."""
    return np.packbits(np.asarray(chosen, bool), bitorder="little").tobytes()


def _spans(numbers: Int64) -> tuple[Int64, Int64]:
    """Return the beginnings and ends of the ranges of consecutive numbers."""
    if not len(numbers):
        return numbers, numbers
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    first = numbers[np.concatenate([[0], breaks + 1])]
    last = numbers[np.concatenate([breaks, [len(numbers) - 1]])] + 1
    return first, last
