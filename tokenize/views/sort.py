"""`tokenize sort`: a view with all documents in the order of a kept field.

    part 0   shard 0 │ shard 1 │ …     the lowest values
    part 1   shard 0 │ shard 1 │ …
    …                                  the highest; then documents without a value

A view's shard is a file of its base, so a sorted view lists each file once for each part: values
rise from part to part, and within a part of a shard. A window of an order (`order` in a mixture) is
larger than a part, and shuffles its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ...console.errors import InputError, MisuseError
from ...console.explain import nearest
from ...console.progress import exact_count
from ...dataplane.arrays import Int64
from ...dataplane.datasets import view
from ...dataplane.datasets.dataset import Dataset
from ...dataplane.datasets.manifest import Manifest
from ...dataplane.datasets.packing import PackedPieces
from ..executors import ExecutorConfig
from .making import ShardResult, ShardTask, ViewRequest, make_view, write_shard

MIN_PARTS, MAX_PARTS = 16, 256
MAX_ENTRIES = 1 << 12
"""Parts times base shards, about: an entry repeats the hashes of a shard's chunks."""
MIN_PART_DOCUMENTS = 16
SORTED_TYPES = ("int", "float", "string")
Values = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class SortConfig:
    dataset: str
    """The URL of the dataset; it may be a view."""
    by: str
    """The kept field, or `tokens`."""
    out: str
    """The URL of the sorted view."""
    engine: ExecutorConfig = field(default_factory=ExecutorConfig)
    """Executor of the tasks."""


@dataclass(frozen=True)
class SortWorker:
    """Sorts a shard's documents, and writes a file for each part."""

    dataset: str
    out: str
    by: str
    bounds: Values
    """The lowest value of each part after the first."""

    @cached_property
    def base(self) -> Dataset:
        return Dataset(self.dataset)

    def __call__(self, task: ShardTask) -> Iterator[ShardResult]:
        dataset, number = self.base, task.number
        values, is_valued = read_values(dataset, number, self.by)
        lengths = dataset.open_shard(number).layout.document_tokens
        parts = np.full(len(values), len(self.bounds) + 1)
        parts[is_valued] = np.searchsorted(self.bounds, values[is_valued], side="right")
        order = np.arange(len(values))
        order[: is_valued.sum()] = _sort_documents(values, np.flatnonzero(is_valued))
        order[is_valued.sum() :] = np.flatnonzero(~is_valued)
        order = order[lengths[order] > 0]
        counts = {"empty": int((lengths == 0).sum()), "unvalued": int((~is_valued).sum())}
        for part in np.unique(parts[order]).tolist():
            documents = order[parts[order] == part]
            yield self._result(task, part, documents, lengths[documents], counts)
            counts = {}
        if counts:
            yield ShardResult(number, None, counts, task.size)

    def _result(
        self, task: ShardTask, part: int, documents: Int64, lengths: Int64, counts: dict[str, int]
    ) -> ShardResult:
        selection = self.base.open_shard(task.number).selection
        zeros = np.zeros(len(documents), np.int64)
        base_documents = documents if selection is None else selection.documents[documents]
        pieces = PackedPieces(base_documents, zeros, lengths, zeros)
        view_shard = write_shard(
            self.base,
            task.number,
            self.out,
            ("pieces", "arrow", pieces.encode()),
            documents=len(documents),
            tokens=int(lengths.sum()),
        )
        size = task.size if counts else 0
        return ShardResult(task.number, view_shard, counts, size, part)


def read_values(dataset: Dataset, shard: int, by: str) -> tuple[Values, npt.NDArray[np.bool_]]:
    """Return the values of a shard's documents, and which documents have one."""
    first, end = dataset.shard_documents[shard : shard + 2].tolist()
    column = dataset.columns(first, end, [by]).column(by)
    is_valued = column.is_valid().to_numpy()
    values = column.to_numpy()
    if values.dtype.kind == "f":
        is_valued = is_valued & ~np.isnan(values)
    return values, is_valued


def _sort_documents(values: Values, documents: Int64) -> Int64:
    return documents[np.argsort(values[documents], kind="stable")]


def sort(config: SortConfig) -> Manifest:
    """Make a sorted view; return its manifest."""
    base_url, out = config.dataset.rstrip("/"), config.out.rstrip("/")
    dataset = Dataset(base_url)
    _check(dataset, config.by)
    base_view = dataset.view
    where = view.encode_steps(() if base_view is None else base_view.steps)
    return make_view(
        ViewRequest(
            verb="sorting",
            dataset=dataset,
            out=out,
            entry={"where": where, view.SORT_KEY: {"by": config.by}},
            weights=dataset.manifest.weights,
            worker=SortWorker(base_url, out, config.by, find_bounds(dataset, config.by)),
            engine=config.engine,
            provenance=lambda counts: {"counts": _left_out(counts)},
            no_documents=lambda _: InputError(f"{base_url} has no document with tokens"),
        )
    )


def find_bounds(dataset: Dataset, by: str) -> Values:
    """Find the lowest value of each part but the first, so that parts have about equal tokens."""
    num_shards, num_documents = len(dataset.shards), int(dataset.shard_documents[-1])
    num_parts = min(
        max(MIN_PARTS, min(MAX_PARTS, MAX_ENTRIES // num_shards)),
        num_documents // MIN_PART_DOCUMENTS,
    )
    if num_shards == 1:
        num_parts = 1
    all_values, all_lengths = [], []
    for shard in range(num_shards):
        values, is_valued = read_values(dataset, shard, by)
        all_values.append(values[is_valued])
        all_lengths.append(dataset.open_shard(shard).layout.document_tokens[is_valued])
    values, lengths = np.concatenate(all_values), np.concatenate(all_lengths)
    if not len(values):
        raise InputError(f"no document of {dataset.url} has a value of {by}")
    order = _sort_documents(values, np.arange(len(values)))
    ends = np.cumsum(lengths[order], dtype=np.int64)
    targets = np.arange(1, max(num_parts, 1)) * (int(ends[-1]) / max(num_parts, 1))
    firsts = np.minimum(np.searchsorted(ends, targets), len(order) - 1)
    bounds: Values = np.unique(values[order[firsts]])
    return bounds


def _check(dataset: Dataset, by: str) -> None:
    """Raise unless the dataset can be sorted by a field."""
    kinds = {**dataset.manifest.kept_fields, "tokens": "int"}
    if kinds.get(by) not in SORTED_TYPES:
        known = [name for name, kind in kinds.items() if kind in SORTED_TYPES]
        suggestion = nearest(by, known)
        raise MisuseError(
            f"{dataset.url} keeps no number or string `{by}` for its documents",
            hint=f"did you mean {suggestion}?" if suggestion else f"sort by {', '.join(known)}",
        )
    if len(dataset.generations) > 1:
        raise MisuseError(
            f"{dataset.url} has {len(dataset.generations)} generations, each of which would be "
            "sorted alone",
            hint="build all files as one dataset",
        )
    if dataset.view is not None and (dataset.view.bins or dataset.view.sorted_by):
        raise MisuseError(
            f"{dataset.url} is packed or sorted already", hint=f"sort {dataset.view.url}"
        )


def _left_out(counts: dict[str, int]) -> dict[str, int]:
    left_out = {"documents without tokens": counts.get("empty", 0)}
    return {name: count for name, count in left_out.items() if count}


def describe_order(manifest: Manifest) -> str:
    """Describe a sorted view in a line."""
    by = manifest.settings[view.KEY][view.SORT_KEY]["by"]
    return (
        f"{exact_count(manifest.documents, 'documents')}, "
        f"{exact_count(manifest.tokens, 'tokens')}, sorted by {by}"
    )
