"""`tokenize pack`: a view with documents in bins, all equally long, by best-fit decreasing.

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
from ..executors import ExecutorConfig
from .best_fit import best_fit
from .making import ShardResult, ShardTask, ViewRequest, make_view, write_shard

Long = Literal["cut", "drop", "keep-first"]
"""Rule for a document longer than a bin: cut it into pieces, drop it, or keep its first bin."""


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
    out: str
    """The URL of the packed view."""
    long: Long = "cut"
    """The rule for documents that are longer than a bin."""
    group_bins: int = 1024
    """Bins of a group, about; benchmarks/packing.py measures the padding with fewer and more."""
    engine: ExecutorConfig = field(default_factory=ExecutorConfig)
    """Executor of the tasks."""

    def __post_init__(self) -> None:
        if self.length < 2:
            raise ValueError(f"--length {self.length}: a bin has at least 2 tokens")
        if self.group_bins < 1:
            raise ValueError(f"group_bins {self.group_bins}: a group has at least one bin")

    def entry(self, steps: Sequence[str] = ()) -> dict[str, Any]:
        """Return the record of choice and layout for the manifest's settings; `steps` are the
        expressions of the packed view."""
        rule = {"length": self.length, "long": self.long, "group_bins": self.group_bins}
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
    length, long = config.length, config.long
    first_tokens = np.cumsum(lengths) - lengths
    num_groups = max(1, round(int(lengths.sum()) / (config.group_bins * length)))
    group_starts = np.searchsorted(
        first_tokens, np.arange(1, num_groups) * (lengths.sum() / num_groups)
    )
    packed_groups = [
        _pack_group(
            cut_long(documents, lengths[documents], length, long), length, f"{seed_name}/{n}"
        )
        for n, documents in enumerate(np.split(np.arange(len(lengths)), group_starts))
    ]
    pieces = PackedPieces.concatenate(packed_groups)
    served = int(pieces.tokens.sum())
    padding = int(pieces.padding.sum())
    too_long = lengths > length
    counts = {
        "bins": (served + padding) // length,
        "padding": padding,
        "documents": len(np.unique(pieces.documents)),
        "tokens": served,
        "long": int(too_long.sum()),
        "left_out": int(lengths.sum()) - served,
        "empty": int((lengths == 0).sum()),
    }
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


def _pack_group(pieces: PackedPieces, length: int, seed_name: str) -> PackedPieces:
    """Return pieces ordered by bin; a bin's last piece gets its padding."""
    count = len(pieces.tokens)
    if not count:
        return pieces
    random_ranks = permute(derive_key(seed_name, "pieces"), count, np.arange(count))
    small = np.flatnonzero(pieces.tokens <= length)
    small = small[np.lexsort((random_ranks[small], -pieces.tokens[small]))]
    counts = np.bincount(pieces.tokens[small], minlength=length + 1)
    bins = np.empty(count, np.int64)
    bins[small], num_small_bins = best_fit(counts, length)
    large = np.flatnonzero(pieces.tokens > length)  # each fills several bins in a row
    bins[large] = num_small_bins + np.arange(len(large))
    num_bins = num_small_bins + len(large)
    bin_positions = permute(derive_key(seed_name, "bins"), num_bins, np.arange(num_bins))[bins]
    order = np.lexsort((random_ranks, bin_positions))
    first = np.flatnonzero(np.diff(bin_positions[order], prepend=-1))
    last = np.append(first[1:], count) - 1
    padding = np.zeros(count, np.int64)
    padding[last] = -np.add.reduceat(pieces.tokens[order], first) % length
    return PackedPieces(pieces.documents[order], pieces.first[order], pieces.tokens[order], padding)


def pack(config: PackConfig) -> Manifest:
    """Make a packed view, or add new generations to it; return its manifest."""
    base_url, out = config.dataset.rstrip("/"), config.out.rstrip("/")
    config = replace(config, dataset=base_url, out=out)
    dataset = Dataset(base_url)
    base_view, weights = dataset.view, dataset.manifest.weights or (1.0,)
    if base_view is not None and base_view.bins is not None:
        raise MisuseError(f"{base_url} is packed already", hint=f"pack {base_view.url} instead")
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


def _no_documents_error(base: str, config: PackConfig) -> InputError:
    return InputError(
        f"no document of {base} has at most {config.length:,} tokens",
        where=f"--long {config.long}",
        hint="choose a longer --length, or --long cut",
    )
