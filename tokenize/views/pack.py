"""`tokenize pack`: a view with documents in bins, all equally long, by best-fit decreasing.

With several lengths, each has a view. A document lies whole in the shortest row that holds it, or
fills the gap of a longer row: documents alone would leave a quarter of all rows empty.

Neighbouring documents are packed together, a group at a time: a chunk of the order then reads few
parts of a shard, and memory is bounded. The bins of a group are permuted, and the pieces of a bin
too: best-fit would put similar bins side by side, and the longest piece first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ...console.errors import InputError, MisuseError
from ...console.log import get_logger
from ...console.progress import format_count
from ...dataplane.arrays import Int64
from ...dataplane.datasets import packing, view
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.datasets.manifest import Manifest
from ...dataplane.datasets.packing import PackedPieces
from ...dataplane.order.epochs.permutation import derive_key, permute
from ...dataplane.storage import storage
from ..executors import ExecutorConfig
from .best_fit import best_fit
from .making import ShardResult, ShardTask, ViewRequest, make_view, write_shard

Long = Literal["cut", "drop", "keep-first"]
"""Rule for a document longer than a bin: cut it into pieces, drop it, or keep its first bin."""


MAX_LENGTH = 1 << 24
"""Tokens of the longest bin: the search for the best bin holds some words for each."""
MUCH_PADDING = 0.25
"""Padding share at which a view gets a warning."""
FEW_BINS = 64
"""Bins per shard below which the last bin, and documents that fit nowhere, weigh much."""

log = get_logger(__name__)


@dataclass(frozen=True, kw_only=True)
class PackConfig:
    dataset: str
    """The URL of the dataset; it may be a view."""
    length: int
    """Tokens of a bin."""
    lengths: tuple[int, ...] = ()
    """Bin lengths of the views that share the documents, with `length`; empty for a single view."""
    out: str
    """The URL of the packed view."""
    long: Long = "cut"
    """The rule for documents that are longer than a bin."""
    group_bins: int = 1024
    """Bins of a group, about; benchmarks/packing.py measures the padding with fewer and more."""
    engine: ExecutorConfig = field(default_factory=ExecutorConfig)
    """Executor of the tasks."""

    def __post_init__(self) -> None:
        for length in {self.length, *self.lengths}:
            if not 2 <= length <= MAX_LENGTH:
                raise ValueError(
                    f"--length {length}: a bin has at least 2 and at most {MAX_LENGTH:,} tokens"
                )
        if self.group_bins < 1:
            raise ValueError(f"group_bins {self.group_bins}: a group has at least one bin")
        for length in self.lengths:
            if self.longest % length:
                raise ValueError(
                    f"--length {length}: every length must divide the longest, {self.longest}"
                )
        if len(set(self.lengths)) < len(self.lengths):
            raise ValueError("--length: a length stands there twice")

    @property
    def longest(self) -> int:
        return max(self.lengths, default=self.length)

    @property
    def levels(self) -> list[tuple[int, int]]:
        """Bin lengths down to `length`, and the length below each: 0 for the shortest."""
        lengths = sorted({*self.lengths, self.length}, reverse=True)
        levels = list(zip(lengths, [*lengths[1:], 0], strict=True))
        return levels[: lengths.index(self.length) + 1]

    def entry(self, steps: Sequence[str] = ()) -> dict[str, Any]:
        """Return the record of choice and layout for the manifest's settings; `steps` are the
        expressions of the packed view."""
        rule: dict[str, Any] = {
            "length": self.length,
            "long": self.long,
            "group_bins": self.group_bins,
        }
        if self.lengths:
            rule["lengths"] = sorted(self.lengths)
        return {"where": view.encode_steps(steps), packing.KEY: rule}


@dataclass(frozen=True)
class PackWorker:
    """Packs a shard's documents, and writes a pieces file."""

    config: PackConfig

    @cached_property
    def base(self) -> Dataset:
        return Dataset(self.config.dataset)

    def __call__(self, task: ShardTask) -> Iterator[ShardResult]:
        dataset, number = self.base, task.number
        shard = dataset.open_shard(number)
        lengths = shard.layout.document_tokens
        pieces, counts = pack_shard(lengths, self.config, shard.shard.hash)
        if not len(pieces.documents):
            yield ShardResult(number, None, counts, task.size)
            return
        tokens = int((pieces.tokens + pieces.padding).sum())
        if shard.selection is not None:
            documents = shard.selection.documents[pieces.documents]
            pieces = PackedPieces(documents, pieces.first, pieces.tokens, pieces.padding)
        view_shard = write_shard(
            dataset,
            number,
            self.config.out,
            ("pieces", "arrow", pieces.encode()),
            documents=len(pieces.documents),
            tokens=tokens,
        )
        yield ShardResult(number, view_shard, counts, task.size)


def pack_shard(
    lengths: Int64, config: PackConfig, seed_name: str
) -> tuple[PackedPieces, dict[str, int]]:
    """Pack documents of these lengths into bins; return the pieces in order, and their counts.

    `seed_name` seeds the permutations.
    """
    longest = config.longest
    first_tokens = np.cumsum(lengths) - lengths
    num_groups = max(1, round(int(lengths.sum()) / (config.group_bins * longest)))
    group_starts = np.searchsorted(
        first_tokens, np.arange(1, num_groups) * (lengths.sum() / num_groups)
    )
    cut_groups = [
        cut_long(documents, lengths[documents], longest, config.long)
        for documents in np.split(np.arange(len(lengths)), group_starts)
    ]
    pieces = PackedPieces.concatenate(
        [_pack_levels(group, config, f"{seed_name}/{n}") for n, group in enumerate(cut_groups)]
    )
    served, padding = int(pieces.tokens.sum()), int(pieces.padding.sum())
    kept_tokens = sum(int(group.tokens.sum()) for group in cut_groups)
    counts = {
        "bins": (served + padding) // config.length,
        "padding": padding,
        "documents": len(np.unique(pieces.documents)),
        "tokens": served,
        "long": int((lengths > longest).sum()),
        "left_out": int(lengths.sum()) - kept_tokens,
        "empty": int((lengths == 0).sum()),
    }
    if config.length < longest:  # counted once, with the longest bins
        counts |= {"long": 0, "left_out": 0, "empty": 0}
    return pieces, counts


def cut_long(documents: Int64, tokens: Int64, length: int, long: Long) -> PackedPieces:
    """Return whole documents as one piece each, and apply the rule `long` to longer ones."""
    fits = (tokens > 0) & (tokens <= length)
    oversized = np.flatnonzero(tokens > length if long != "drop" else np.zeros(len(tokens), bool))
    heads = np.full(len(oversized), length)
    tails = np.zeros(len(oversized), np.int64)
    if long == "cut":
        heads = tokens[oversized] // length * length
        tails = tokens[oversized] - heads
    has_tail = tails > 0
    firsts = (np.zeros(fits.sum() + len(oversized), np.int64), heads[has_tail])
    return PackedPieces(
        documents=np.concatenate(
            [documents[fits], documents[oversized], documents[oversized][has_tail]]
        ),
        first=np.concatenate(firsts),
        tokens=np.concatenate([tokens[fits], heads, tails[has_tail]]),
        padding=np.zeros(fits.sum() + len(oversized) + has_tail.sum(), np.int64),
    )


def _pack_levels(pieces: PackedPieces, config: PackConfig, seed_name: str) -> PackedPieces:
    """Pack a group's pieces into bins of all lengths, the longest first; return those of
    `config.length`."""
    levels = config.levels
    for length, shorter in levels[:-1]:
        _, pieces = _pack_group(pieces, length, shorter + 1, f"{seed_name}/{length}")
    length, shorter = levels[-1]
    name = f"{seed_name}/{length}" if config.lengths else seed_name
    return _pack_group(pieces, length, shorter + 1, name)[0]


def _pack_group(
    pieces: PackedPieces, length: int, min_opening: int, seed_name: str
) -> tuple[PackedPieces, PackedPieces]:
    """Return pieces ordered by bin, and those that stay behind (best_fit.py); a bin's last piece
    gets its padding."""
    count = len(pieces.tokens)
    if not count:
        return pieces, pieces
    random_ranks = permute(derive_key(seed_name, "pieces"), count, np.arange(count))
    small = np.flatnonzero(pieces.tokens <= length)
    small = small[np.lexsort((random_ranks[small], -pieces.tokens[small]))]
    counts = np.bincount(pieces.tokens[small], minlength=length + 1)
    small_bins, num_small_bins, packed_counts = best_fit(counts, length, min_opening)
    longer = np.cumsum(counts[::-1])[::-1] - counts
    rank_in_length = np.arange(len(small)) - longer[pieces.tokens[small]]
    is_packed = rank_in_length < packed_counts[pieces.tokens[small]]
    behind, small = small[~is_packed], small[is_packed]
    bins = np.full(count, -1, np.int64)
    bins[small] = small_bins
    large = np.flatnonzero(pieces.tokens > length)  # each fills several bins in a row
    bins[large] = num_small_bins + np.arange(len(large))
    num_bins = num_small_bins + len(large)
    bin_positions = np.full(count, num_bins, np.int64)  # pieces that stay behind come last
    is_placed = bins >= 0
    permuted_bins = permute(derive_key(seed_name, "bins"), num_bins, np.arange(num_bins))
    bin_positions[is_placed] = permuted_bins[bins[is_placed]]
    order = np.lexsort((random_ranks, bin_positions))[: count - len(behind)]
    first = np.flatnonzero(np.diff(bin_positions[order], prepend=-1))
    last = np.append(first[1:], len(order)) - 1
    padding = np.zeros(len(order), np.int64)
    if len(order):
        padding[last] = -np.add.reduceat(pieces.tokens[order], first) % length
    return replace(_take(pieces, order), padding=padding), _take(pieces, np.sort(behind))


def _take(pieces: PackedPieces, indices: Int64) -> PackedPieces:
    return PackedPieces(
        pieces.documents[indices],
        pieces.first[indices],
        pieces.tokens[indices],
        pieces.padding[indices],
    )


def pack_lengths(config: PackConfig) -> dict[str, Manifest | None]:
    """Make a packed view for each of `config.lengths`, at OUT/LENGTH; return manifests by URL, None
    where no document is left for a length."""
    manifests: dict[str, Manifest | None] = {}
    for length in sorted(config.lengths, reverse=True):
        url = storage.join(config.out.rstrip("/"), str(length))
        try:
            manifests[url] = pack(replace(config, length=length, out=url))
        except NoDocumentsError:
            manifests[url] = None
    if not any(manifests.values()):
        raise _no_documents_error(config.dataset, config)
    return manifests


def pack(config: PackConfig) -> Manifest:
    """Make a packed view, or add new generations to it; return its manifest."""
    base_url, out = config.dataset.rstrip("/"), config.out.rstrip("/")
    config = replace(config, dataset=base_url, out=out)
    dataset = Dataset(base_url)
    base_view, weights = dataset.view, dataset.manifest.weights or (1.0,)
    if base_view is not None and base_view.bins is not None:
        raise MisuseError(f"{base_url} is packed already", hint=f"pack {base_view.url} instead")
    if base_view is not None and base_view.sorted_by is not None:
        raise MisuseError(
            f"{base_url} is sorted, and bins would not be", hint=f"pack {base_view.url} instead"
        )
    manifest = make_view(
        ViewRequest(
            verb="packing",
            dataset=dataset,
            out=out,
            entry=config.entry(() if base_view is None else base_view.steps),
            weights=(*weights, 0.0),  # the last code is padding
            worker=PackWorker(config),
            engine=config.engine,
            provenance=lambda counts: _provenance(counts, config.long),
            no_documents=lambda _: _no_documents_error(base_url, config),
        )
    )
    _warn_about_padding(manifest, config)
    return manifest


def _warn_about_padding(manifest: Manifest, config: PackConfig) -> None:
    """Warn about a view that trains on much padding, and name the cause."""
    padding_share = packing.count_padding(manifest) / manifest.tokens
    if padding_share < MUCH_PADDING:
        return
    shards = sum(generation.shards for generation in manifest.generations)
    bins_per_shard = manifest.tokens / config.length / shards
    served = manifest.tokens - packing.count_padding(manifest)
    log.warning(
        "%.1f%% of the bins of %s are padding, which training computes for nothing: %s",
        100 * padding_share,
        config.out,
        f"its shards fill {format_count(bins_per_shard, 'bins')} each; build with --shuffle or a "
        "larger --shard-size, or choose a shorter --length"
        if bins_per_shard < FEW_BINS
        else f"documents of {served / packing.count_documents(manifest):,.0f} tokens on average "
        f"leave much of {config.length:,}; choose another --length",
    )


def _provenance(counts: dict[str, int], long: Long) -> dict[str, Any]:
    """Return a generation's provenance: what was left out, and totals over bins."""
    left_out = {"documents without tokens": counts.pop("empty", 0)}
    dropped_tokens = counts.pop("left_out", 0)
    if long == "drop":
        left_out["documents longer than a bin"] = counts.get("long", 0)
    elif long == "keep-first":
        left_out["tokens after the first bin of a document"] = dropped_tokens
    return {
        "counts": {name: count for name, count in left_out.items() if count},
        packing.KEY: counts,
    }


class NoDocumentsError(InputError):
    """A packed view would have no documents."""


def _no_documents_error(base: str, config: PackConfig) -> NoDocumentsError:
    return NoDocumentsError(
        f"no document of {base} has at most {config.length:,} tokens",
        where=f"--long {config.long}",
        hint="choose a longer --length, or --long cut",
    )
