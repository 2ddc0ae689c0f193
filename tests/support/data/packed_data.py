"""Small packed views, and mixtures of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from support.data.small_data import plan_of, random_documents, write_dataset

from headrace.dataplane.datasets.dataset import Dataset
from headrace.dataplane.datasets.manifest import Manifest
from headrace.dataplane.order.plan import Plan
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.views.pack import PackConfig, pack

L = 64
"""Tokens of a bin."""
Document = np.ndarray[Any, Any]


def packed(base: str | Path, out: Path, **options: Any) -> Manifest:
    options = {"length": L, "group_bins": 16, "engine": ExecutorConfig(workers=1), **options}
    return pack(PackConfig(dataset=str(base), out=str(out), **options))


def write_corpus(path: Path, count: int = 120, *, seed: int = 0, **options: Any) -> list[Document]:
    documents = random_documents(seed, count, longest=100)
    write_dataset(str(path), documents, **options)
    return documents


def pieces_of(url: Path) -> list[tuple[int, int, list[int]]]:
    """Return the number, the first token and the tokens of every piece, as a reader sees them."""
    dataset = Dataset(str(url))
    ids = np.empty(dataset.tokens, np.int64)
    dataset.fill(0, ids)
    places = dataset.base_positions(0, int(dataset.shard_documents[-1]))
    return [
        (*place, ids[start:end].tolist())
        for number, place in enumerate(places)
        for start, end in [dataset.document(number)]
    ]


def mixture(sources: dict[str, Any], *, tokens: int, epochs: int = 1, **phase: Any) -> Plan:
    share = 1 / len(sources)
    values = {"seq_len": L, "batch": 4 * L, "weights": dict.fromkeys(sources, share), **phase}
    return plan_of(
        {
            "chunk": 4 * L,
            "window": 3,
            "sources": {
                name: {"data": str(path), "max_epochs": epochs} for name, path in sources.items()
            },
            "phases": {"all": {"tokens": tokens, **values}},
        }
    )
