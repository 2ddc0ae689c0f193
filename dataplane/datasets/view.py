"""Views: datasets without tokens, made from documents in a base dataset.

    URL/manifest.json        names the base dataset and the expression that selects documents
    URL/tables/<hash>.arrow  the base dataset's shards, with the view's counts
    URL/views/<hash>.bits    per shard, a bit for each document; or, if the view is packed or
                             sorted, <hash>.arrow: document pieces (packing.py)

A view's shard is a file of the base dataset under another layout, whose runs are the selected
documents. So order, rows, cache and hashes work as for any dataset.
"""

from __future__ import annotations

import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...console.errors import IntegrityError, StorageError
from ...console.progress import exact_count
from ..arrays import Int64
from ..shards.format import ShardLayout
from ..storage import storage
from ..storage.verified import read_named
from . import packing
from .manifest import NAME, Manifest, Shard
from .packing import PackedPieces

FOLDER = "views"
KEY = "view"
"""Key of `Manifest.settings` and of `Shard.details`."""
SORT_KEY = "sort"
"""Key of a sorted view's settings, in those of a view."""
REMAKE_HINT = (
    "make the view again: the same `tokenize select` or `tokenize pack` writes lost and damaged "
    "files again"
)


@dataclass(frozen=True)
class View:
    """A view's base dataset, and how documents are selected and laid out."""

    url: str
    """URL of the base dataset."""
    steps: tuple[str, ...]
    """Selecting expressions, in order; empty: all documents. In an expression, `document` counts
    the documents selected so far."""
    bins: int | None = None
    """Bin length in tokens, if the view is packed."""
    sorted_by: str | None = None
    """Field, if the view is sorted."""

    @property
    def where(self) -> str | None:
        """The selection in words; None if the view has all documents."""
        if len(self.steps) > 1:
            return " then ".join(f"({step})" for step in self.steps)
        return self.steps[0] if self.steps else None

    @property
    def text(self) -> str:
        """The view in words."""
        packing_text = [] if self.bins is None else [f"packed to {self.bins:,} tokens"]
        sort_text = [] if self.sorted_by is None else [f"sorted by {self.sorted_by}"]
        where_text = [] if self.where is None else [f"where {self.where}"]
        return ", ".join([*where_text, *packing_text, *sort_text])


def parse_view(url: str, manifest: Manifest) -> View | None:
    """Return the view that a manifest describes; None for a dataset with tokens."""
    entry = manifest.settings.get(KEY)
    if entry is None:
        return None
    base_url = str(entry["of"])
    if storage.is_local(base_url) and not base_url.startswith("/"):
        base_url = posixpath.normpath(storage.join(url, base_url))
    where = entry["where"]
    steps = (where,) if isinstance(where, str) else tuple(where or ())
    sorted_by = entry[SORT_KEY]["by"] if SORT_KEY in entry else None
    return View(base_url, steps, packing.bin_length(manifest), sorted_by)


def check_dataset(url: str, view: View | None) -> None:
    """Raise StorageError if the base dataset is missing."""
    if view is not None and not storage.exists(storage.join(view.url, NAME)):
        raise StorageError(
            f"{url} is a view, and its dataset is missing: there is none at {view.url}",
            hint="put the dataset back there, or make the view again from where the dataset is now",
        )


def encode_steps(steps: Sequence[str]) -> str | list[str] | None:
    """Return a view's expressions as the manifest stores them: a string, a list, or None."""
    return list(steps) if len(steps) > 1 else next(iter(steps), None)


def base_dataset_totals(manifest: Manifest) -> tuple[int, int]:
    """Return the number of documents and tokens in a view's base dataset."""
    bases = [generation.provenance[KEY] for generation in manifest.generations]
    return sum(base["documents"] for base in bases), sum(base["tokens"] for base in bases)


@dataclass(frozen=True, eq=False)
class Selection:
    """The documents that a view selects from a shard."""

    documents: Int64
    """Document numbers in the shard; ascending, unless the view is packed or sorted."""
    first: int
    """The shard's first document, as a number in the base dataset."""
    pieces: PackedPieces | None = None
    """Document pieces, if the view is packed or sorted."""

    def base_positions(self, first: int, end: int) -> list[tuple[int, int]]:
        """Return (document number in the base dataset, first token in that document) for the
        documents [first, end)."""
        numbers = [self.first + number for number in self.documents[first:end].tolist()]
        if self.pieces is None:
            return [(number, 0) for number in numbers]
        return list(zip(numbers, self.pieces.first[first:end].tolist(), strict=True))

    def select_layout(self, base_layout: ShardLayout, width: int) -> ShardLayout:
        """Return the layout of the selected documents, from the base shard's layout and bytes per
        id."""
        if self.pieces is not None:
            starts, ends = self.pieces.spans(base_layout)
            return self.pieces.padded(*_layout_spans(base_layout, starts, ends, width))
        document_starts = base_layout.document_starts
        first_documents, end_documents = _group_spans(self.documents)
        starts, ends = document_starts[first_documents], document_starts[end_documents]
        nonempty = ends > starts
        layout, _ = _layout_spans(base_layout, starts[nonempty], ends[nonempty], width)
        lengths = np.diff(document_starts)[self.documents]
        return replace(
            layout, document_starts=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        )


def read_selection(url: str, shard: Shard) -> Selection | None:
    """Read a view's selection from a shard; None if the dataset is no view."""
    entry = shard.details.get(KEY)
    if entry is None:
        return None
    data = read_named(url, selection_file(shard), hint=REMAKE_HINT)
    pieces = None
    if "pieces" in entry:
        pieces = PackedPieces.decode(data)
        documents = pieces.documents
    else:
        bits = np.frombuffer(data, np.uint8)
        is_selected = np.unpackbits(
            bits, count=min(entry["documents"], 8 * len(bits)), bitorder="little"
        )
        documents = np.flatnonzero(is_selected)
    if len(documents) != shard.documents:
        raise IntegrityError(
            f"{url} chooses {exact_count(len(documents), 'documents')} of "
            f"{shard.name}; its manifest says "
            f"{shard.documents:,}",
            hint=REMAKE_HINT,
        )
    return Selection(documents, entry["first"], pieces)


def selection_file(shard: Shard) -> str:
    """Return the name of a shard's selection file."""
    entry = shard.details[KEY]
    name: str = entry["pieces"] if "pieces" in entry else entry["bits"]
    return name


def pack_bits(is_selected: Any) -> bytes:
    """Return the content of a bits file, from a boolean per document in a shard."""
    return np.packbits(np.asarray(is_selected, bool), bitorder="little").tobytes()


def _layout_spans(
    layout: ShardLayout, starts: Int64, ends: Int64, width: int
) -> tuple[ShardLayout, Int64]:
    """Return the layout of token spans [start, end) laid side by side, and the runs per span: a
    span is cut where the shard's runs meet."""
    run_tokens = layout.run_tokens
    first_runs = np.searchsorted(run_tokens, starts, side="right") - 1
    run_counts = np.searchsorted(run_tokens, ends, side="left") - first_runs
    owners = np.repeat(np.arange(len(starts)), run_counts)
    runs = (
        first_runs[owners] + np.arange(len(owners)) - (np.cumsum(run_counts) - run_counts)[owners]
    )
    run_starts = np.maximum(starts[owners], run_tokens[runs])
    run_ends = np.minimum(ends[owners], run_tokens[runs + 1])
    skipped = run_starts - run_tokens[runs]
    weights = layout.weight_bytes
    spans_layout = ShardLayout(
        document_starts=np.concatenate([[0], np.cumsum(ends - starts)]).astype(np.int64),
        run_tokens=np.concatenate([[0], np.cumsum(run_ends - run_starts)]).astype(np.int64),
        run_bytes=layout.run_bytes[runs] + skipped * width,
        weight_bytes=None if weights is None else weights[runs] + skipped,
    )
    return spans_layout, run_counts


def _group_spans(numbers: Int64) -> tuple[Int64, Int64]:
    """Return the starts and ends of ranges of consecutive numbers."""
    if not len(numbers):
        return numbers, numbers
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    starts = numbers[np.concatenate([[0], breaks + 1])]
    ends = numbers[np.concatenate([breaks, [len(numbers) - 1]])] + 1
    return starts, ends
