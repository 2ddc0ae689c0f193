"""Datasets, views and packs as a Hugging Face `Dataset`: `to_datasets("data/web").save_to_disk(…)`.

    documents   input_ids of a document, with its end token
    a pack      input_ids of a bin, with position_ids: documents are isolated by them

`labels` are the input ids, or -100 where a token has no loss, and at the start of a pack's pieces:
no piece is predicted from another. Models of transformers shift them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...console.errors import MissingError
from ..arrays import Int64
from ..datasets import packing
from ..datasets.dataset import Dataset

Float32 = npt.NDArray[np.float32]
IGNORED = -100
ORIGIN = ("id", "file", "position")


def to_datasets(url: str, *, generations: int | None = None, workers: int | None = None) -> Any:
    """Return a dataset, a view or a packed view at a path or URL as a `datasets.Dataset`.

    Columns: `input_ids`; of documents also the kept fields, `id`, `file` and `position`; of bins
    `position_ids`; of both, where tokens without loss may be, `labels`, and `loss_weights` if there
    are weights between 0 and 1. It is written to the cache of `datasets` once, shard by shard.
    """
    try:
        import datasets
    except ImportError:
        raise MissingError(
            "a Hugging Face Dataset needs datasets", hint="pip install datasets"
        ) from None
    dataset = Dataset(url, generations=generations)
    return datasets.Dataset.from_generator(
        read_examples,
        features=datasets.Features.from_arrow_schema(_schema(dataset)),
        # The hash names the content: a dataset that has grown is written anew.
        gen_kwargs={
            "url": url,
            "generations": len(dataset.generations),
            "hash": dataset.hash,
            "shards": list(range(len(dataset.shards))),
        },
        num_proc=workers,
    )


def read_examples(
    url: str, generations: int, hash: str, shards: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the documents or bins of some shards."""
    dataset = Dataset(url, generations=generations)
    names, length = _schema(dataset).names, packing.bin_length(dataset.manifest)
    for shard in shards:
        first_token, end_token = dataset.shard_tokens[shard : shard + 2].tolist()
        tokens = np.empty(end_token - first_token, np.int32)
        dataset.fill(first_token, tokens)
        weights = _read_weights(dataset, first_token, end_token)
        starts = dataset.open_shard(shard).layout.document_starts.astype(np.int64)
        examples = (
            _documents(dataset, shard, starts, tokens, weights)
            if length is None
            else _bins(length, starts, tokens, weights)
        )
        for example in examples:
            yield {name: example[name] for name in names}


def _documents(
    dataset: Dataset, shard: int, starts: Int64, tokens: Any, weights: Float32 | None
) -> Iterator[dict[str, Any]]:
    first, end = dataset.shard_documents[shard : shard + 2].tolist()
    rows = dataset.columns(first, end, _field_names(dataset)).to_pylist() if first < end else []
    for number, row in enumerate(rows):
        span = slice(int(starts[number]), int(starts[number + 1]))
        yield {**row, **_columns(tokens[span], None if weights is None else weights[span])}


def _bins(
    length: int, starts: Int64, tokens: Any, weights: Float32 | None
) -> Iterator[dict[str, Any]]:
    places = np.arange(len(tokens))
    begins = starts[np.searchsorted(starts, places, side="right") - 1]
    # A piece of a long document may fill several bins.
    positions = places - np.maximum(begins, places // length * length)
    weights = np.ones(len(tokens), np.float32) if weights is None else weights
    labels = np.where((weights == 0) | (positions == 0), IGNORED, tokens)
    for first in range(0, len(tokens), length):
        span = slice(first, first + length)
        columns = _columns(tokens[span], weights[span])
        yield {**columns, "labels": labels[span], "position_ids": positions[span]}


def _columns(tokens: Any, weights: Float32 | None) -> dict[str, Any]:
    if weights is None:
        return {"input_ids": tokens}
    labels = np.where(weights == 0, IGNORED, tokens)
    return {"input_ids": tokens, "labels": labels, "loss_weights": weights}


def _read_weights(dataset: Dataset, start: int, end: int) -> Float32 | None:
    table = dataset.weight_table
    if table is None:
        return None
    codes = list(dataset.codes(start, end))
    return table[np.concatenate(codes)] if codes else np.empty(0, np.float32)


def _schema(dataset: Dataset) -> Any:
    import pyarrow as pa

    fields = [("input_ids", pa.list_(pa.int32()))]
    table, is_packed = dataset.weight_table, packing.bin_length(dataset.manifest) is not None
    if table is not None or is_packed:
        fields.append(("labels", pa.list_(pa.int32())))
    if table is not None and not np.isin(table, (0, 1)).all():
        fields.append(("loss_weights", pa.list_(pa.float32())))
    if is_packed:
        return pa.schema([*fields, ("position_ids", pa.list_(pa.int32()))])
    if dataset.shard_documents[-1]:
        fields += list(dataset.columns(0, 1, _field_names(dataset)).schema)
    return pa.schema(fields)


def _field_names(dataset: Dataset) -> list[str]:
    return list(dict.fromkeys([*dataset.manifest.kept_fields, *ORIGIN]))
