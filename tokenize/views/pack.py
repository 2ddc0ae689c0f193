"""`tokenize pack`: a view whose documents lie in bins of equal length, best-fit decreasing.

Documents are packed in groups of neighbours, so that a chunk of the order reads few parts of a
shard, and memory is bounded. The bins of a group are permuted, and so are the pieces of a bin:
best-fit would put bins of one kind side by side, and the longest piece first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from ...console.errors import InputError, MisuseError
from ...console.log import get_logger
from ...console.progress import counted
from ...dataplane.arrays import Int64
from ...dataplane.datasets import packing, view
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.datasets.manifest import Manifest
from ...dataplane.datasets.packing import Pieces
from ...dataplane.order.epochs.permutation import key, permute
from ..executors import ExecutorConfig
from .best_fit import best_fit
from .making import MadeShard, Making, ShardTask, made_shard, make

Long = Literal["cut", "drop", "keep-first"]
"""Rule for a document that is longer than a bin: it is cut into pieces, left out, or cut to
the tokens of one bin."""


MUCH_PADDING = 0.25
"""Share of padding from which a view is named in a warning."""
FEW_BINS = 64
"""Bins of a shard below which its last bin, and documents that fit nowhere, weigh much."""

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
        """Return how documents are chosen and laid out, for the settings of the manifest; `steps`
        are the expressions of the view that is packed."""
        rule = {"length": self.length, "long": self.long, "group_bins": self.group_bins}
        return {"where": view.recorded(steps), packing.KEY: rule}


@dataclass(frozen=True)
class PackWorker:
    """Packs the documents of a shard, and writes a file of pieces."""

    config: PackConfig

    @cached_property
    def opened(self) -> Dataset:
        return Dataset(self.config.dataset)

    def __call__(self, task: ShardTask) -> Iterator[MadeShard]:
        dataset, number = self.opened, task.number
        opened = dataset.open_shard(number)
        lengths = opened.layout.document_tokens
        pieces, counts = pack_shard(lengths, self.config, opened.shard.hash)
        if not len(pieces.documents):
            yield MadeShard(number, None, counts, task.size)
            return
        tokens = int((pieces.tokens + pieces.padding).sum())
        if opened.selection is not None:
            chosen = opened.selection.documents[pieces.documents]
            pieces = Pieces(chosen, pieces.first, pieces.tokens, pieces.padding)
        made = made_shard(
            dataset,
            number,
            self.config.out,
            ("pieces", "arrow", pieces.encode()),
            documents=len(pieces.documents),
            tokens=tokens,
        )
        yield MadeShard(number, made, counts, task.size)


def pack_shard(lengths: Int64, config: PackConfig, name: str) -> tuple[Pieces, dict[str, int]]:
    """Pack documents of these lengths into bins; return the pieces in order, and counts of them.

    `name` is that of the permutations.
    """
    length, long = config.length, config.long
    before = np.cumsum(lengths) - lengths
    groups = max(1, round(int(lengths.sum()) / (config.group_bins * length)))
    edges = np.searchsorted(before, np.arange(1, groups) * (lengths.sum() / groups))
    parts = [
        _pack_group(cut_long(documents, lengths[documents], length, long), length, f"{name}/{n}")
        for n, documents in enumerate(np.split(np.arange(len(lengths)), edges))
    ]
    pieces = Pieces.concatenate(parts)
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


def cut_long(documents: Int64, tokens: Int64, length: int, long: Long) -> Pieces:
    """Return the pieces of documents: each whole, unless it is longer than a bin."""
    whole = (tokens > 0) & (tokens <= length)
    over = np.flatnonzero(tokens > length if long != "drop" else np.zeros(len(tokens), bool))
    heads = tokens[over] // length * length if long == "cut" else np.full(len(over), length)
    rests = tokens[over] - heads if long == "cut" else np.zeros(len(over), np.int64)
    cut = rests > 0
    firsts = (np.zeros(whole.sum() + len(over), np.int64), heads[cut])
    return Pieces(
        documents=np.concatenate([documents[whole], documents[over], documents[over][cut]]),
        first=np.concatenate(firsts),
        tokens=np.concatenate([tokens[whole], heads, rests[cut]]),
        padding=np.zeros(whole.sum() + len(over) + cut.sum(), np.int64),
    )


def _pack_group(pieces: Pieces, length: int, name: str) -> Pieces:
    """Return pieces in the order of their bins, with the padding that fills each bin."""
    count = len(pieces.tokens)
    if not count:
        return pieces
    chance = permute(key(name, "pieces"), count, np.arange(count))
    small = np.flatnonzero(pieces.tokens <= length)
    small = small[np.lexsort((chance[small], -pieces.tokens[small]))]
    counts = np.bincount(pieces.tokens[small], minlength=length + 1)
    bins = np.empty(count, np.int64)
    bins[small], used = best_fit(counts, length)
    large = np.flatnonzero(pieces.tokens > length)  # each fills several bins in a row
    bins[large] = used + np.arange(len(large))
    total = used + len(large)
    places = permute(key(name, "bins"), total, np.arange(total))[bins]
    order = np.lexsort((chance, places))
    first = np.flatnonzero(np.diff(places[order], prepend=-1))
    last = np.append(first[1:], count) - 1
    padding = np.zeros(count, np.int64)
    padding[last] = -np.add.reduceat(pieces.tokens[order], first) % length
    return Pieces(pieces.documents[order], pieces.first[order], pieces.tokens[order], padding)


def pack(config: PackConfig) -> Manifest:
    """Make a packed view, or add new generations to it; return its manifest."""
    base, out = config.dataset.rstrip("/"), config.out.rstrip("/")
    config = replace(config, dataset=base, out=out)
    dataset = Dataset(base)
    over, weights = dataset.view, dataset.manifest.weights or (1.0,)
    if over is not None and over.bins is not None:
        raise MisuseError(f"{base} is packed already", hint=f"pack {over.url} instead")
    held = make(
        Making(
            verb="packing",
            dataset=dataset,
            out=out,
            entry=config.entry(() if over is None else over.steps),
            weights=(*weights, 0.0),  # the last code is that of padding
            worker=PackWorker(config),
            engine=config.engine,
            provenance=lambda counts: _provenance(counts, config.long),
            nothing=lambda _: _empty(base, config),
        )
    )
    _warn_of_padding(held, config)
    return held


def _warn_of_padding(held: Manifest, config: PackConfig) -> None:
    """Name a view that trains on padding, and what causes it."""
    share = packing.padding_of(held) / held.tokens
    if share < MUCH_PADDING:
        return
    shards = sum(made.shards for made in held.generations)
    bins = held.tokens / config.length / shards
    served = held.tokens - packing.padding_of(held)
    log.warning(
        "%.1f%% of the bins of %s are padding, which training computes for nothing: %s",
        100 * share,
        config.out,
        f"its shards fill {counted(bins, 'bins')} each; build with --shuffle or a larger "
        "--shard-size, or choose a shorter --length"
        if bins < FEW_BINS
        else f"documents of {served / packing.documents_of(held):,.0f} tokens on average leave "
        f"much of {config.length:,}; choose another --length",
    )


def _provenance(counts: dict[str, int], long: Long) -> dict[str, Any]:
    """Return the provenance of a generation: what was left out, and the sums of its bins."""
    left_out = {"documents without tokens": counts.pop("empty", 0)}
    tokens = counts.pop("left_out", 0)
    if long == "drop":
        left_out["documents longer than a bin"] = counts.get("long", 0)
    elif long == "keep-first":
        left_out["tokens after the first bin of a document"] = tokens
    return {
        "counts": {name: count for name, count in left_out.items() if count},
        packing.KEY: counts,
    }


def _empty(base: str, config: PackConfig) -> InputError:
    return InputError(
        f"no document of {base} has at most {config.length:,} tokens",
        where=f"--long {config.long}",
        hint="choose a longer --length, or --long cut",
    )
