"""Views: datasets without tokens of their own, made of documents of another dataset.

    URL/manifest.json        names the other dataset and the expression that chooses its documents
    URL/tables/<hash>.arrow  shards of the other dataset, with the view's counts
    URL/views/<hash>.bits    for each shard, one bit for each of its documents; or, if the view is
                             packed, <hash>.arrow: its pieces of documents (packing.py)

A shard of a view is a file of the other dataset under another layout: its runs are those of the
chosen documents. Order, rows, cache and hashes are therefore those of any dataset.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...console.errors import IntegrityError, StorageError
from ..arrays import Int64
from ..shards.format import ShardLayout
from ..storage import storage
from ..storage.verified import read_named
from . import packing
from .manifest import NAME, Manifest, Shard
from .packing import Pieces

FOLDER = "views"
KEY = "view"
"""Key of `Manifest.settings` and of `Shard.details`."""
AGAIN = (
    "make the view again: the same `tokenize select` or `tokenize pack` writes lost and damaged "
    "files again"
)


@dataclass(frozen=True)
class View:
    """The dataset whose documents a view has, and how they were chosen and laid out."""

    url: str
    steps: tuple[str, ...]
    """The expressions that chose them, in order; none: it has all of them. In each, `document`
    counts the documents that the expressions before it have chosen."""
    bins: int | None = None
    """Tokens of a bin, if the view is packed."""

    @property
    def where(self) -> str | None:
        """The choice in words; None if it has all documents."""
        if len(self.steps) > 1:
            return " then ".join(f"({step})" for step in self.steps)
        return self.steps[0] if self.steps else None

    @property
    def text(self) -> str:
        """The view in words."""
        packed = [] if self.bins is None else [f"packed to {self.bins:,} tokens"]
        return ", ".join([*([] if self.where is None else [f"where {self.where}"]), *packed])


def view_of(url: str, manifest: Manifest) -> View | None:
    """Return what a dataset is a view of; None if it has tokens of its own."""
    entry = manifest.settings.get(KEY)
    if entry is None:
        return None
    of = str(entry["of"])
    if storage.is_local(of) and not of.startswith("/"):
        of = posixpath.normpath(storage.join(url, of))
    where = entry["where"]
    steps = (where,) if isinstance(where, str) else tuple(where or ())
    return View(of, steps, packing.length_of(manifest))


def check_dataset(url: str, view: View | None) -> None:
    """Raise StorageError if there is no dataset where a view at `url` has its tokens from."""
    if view is not None and not storage.exists(storage.join(view.url, NAME)):
        raise StorageError(
            f"{url} is a view, and its dataset is missing: there is none at {view.url}",
            hint="put the dataset back there, or make the view again from where the dataset is now",
        )


def recorded(steps: Sequence[str]) -> str | list[str] | None:
    """Return the expressions of a view as its manifest stores them: one, a list, or none."""
    return list(steps) if len(steps) > 1 else next(iter(steps), None)


def documents_of(manifest: Manifest) -> tuple[int, int]:
    """Return the documents and tokens of the dataset that a view is of."""
    of = [made.provenance[KEY] for made in manifest.generations]
    return sum(each["documents"] for each in of), sum(each["tokens"] for each in of)


@dataclass(frozen=True, eq=False)
class Selection:
    """The documents of a shard that a view has."""

    documents: Int64
    """Their numbers in the shard; ascending, unless the view is packed."""
    first: int
    """Number of the shard's first document in the other dataset."""
    pieces: Pieces | None = None
    """If the view is packed: the pieces of these documents."""

    def places(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the numbers of documents [first, last) in the other dataset, and the first token
        of each in that document."""
        numbers = [self.first + number for number in self.documents[first:last].tolist()]
        cuts = [0] * len(numbers) if self.pieces is None else self.pieces.first[first:last].tolist()
        return list(zip(numbers, cuts, strict=True))

    def layout(self, whole: ShardLayout, width: int) -> ShardLayout:
        """Return the layout of the chosen documents, from that of the whole shard, whose ids have
        `width` bytes."""
        if self.pieces is not None:
            return self.pieces.padded(*_layout(whole, *self.pieces.spans(whole), width))
        starts = whole.document_starts
        first, last = _spans(self.documents)
        low, high = starts[first], starts[last]
        filled = high > low
        made, _ = _layout(whole, low[filled], high[filled], width)
        lengths = np.diff(starts)[self.documents]
        return replace(
            made, document_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        )


def selection_of(url: str, shard: Shard) -> Selection | None:
    """Return the documents that a view has of a shard; None for a shard of its own dataset."""
    entry = shard.details.get(KEY)
    if entry is None:
        return None
    data = read_named(url, file_of(shard), hint=AGAIN)
    pieces = None
    if "pieces" in entry:
        pieces = Pieces.decode(data)
        documents = pieces.documents
    else:
        bits = np.frombuffer(data, np.uint8)
        chosen = np.unpackbits(
            bits, count=min(entry["documents"], 8 * len(bits)), bitorder="little"
        )
        documents = np.flatnonzero(chosen)
    if len(documents) != shard.documents:
        raise IntegrityError(
            f"{url} chooses {len(documents):,} documents of {shard.name}; its manifest says "
            f"{shard.documents:,}",
            hint=AGAIN,
        )
    return Selection(documents, entry["first"], pieces)


def file_of(shard: Shard) -> str:
    """Return the name of the file that says what a view has of a shard."""
    entry = shard.details[KEY]
    name: str = entry["pieces"] if "pieces" in entry else entry["bits"]
    return name


def bits_of(chosen: Any) -> bytes:
    """Return the content of a file of bits, from a boolean for each document of a shard."""
    return np.packbits(np.asarray(chosen, bool), bitorder="little").tobytes()


def _layout(whole: ShardLayout, low: Int64, high: Int64, width: int) -> tuple[ShardLayout, Int64]:
    """Return the layout of spans [low, high) of a shard's tokens, side by side, and the number of
    runs of each span: it is cut where runs of the shard meet."""
    runs = whole.run_tokens
    begin = np.searchsorted(runs, low, side="right") - 1
    count = np.searchsorted(runs, high, side="left") - begin
    owner = np.repeat(np.arange(len(low)), count)
    run = begin[owner] + np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
    start = np.maximum(low[owner], runs[run])
    end = np.minimum(high[owner], runs[run + 1])
    skipped = start - runs[run]
    weights = whole.weight_bytes
    made = ShardLayout(
        document_starts=np.concatenate([[0], np.cumsum(high - low)]).astype(np.int64),
        run_tokens=np.concatenate([[0], np.cumsum(end - start)]).astype(np.int64),
        run_bytes=whole.run_bytes[run] + skipped * width,
        weight_bytes=None if weights is None else weights[run] + skipped,
    )
    return made, count


def _spans(numbers: Int64) -> tuple[Int64, Int64]:
    """Return the beginnings and ends of the ranges of consecutive numbers."""
    if not len(numbers):
        return numbers, numbers
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    first = numbers[np.concatenate([[0], breaks + 1])]
    last = numbers[np.concatenate([breaks, [len(numbers) - 1]])] + 1
    return first, last
