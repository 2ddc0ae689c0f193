"""Connect document pairs into clusters. A cluster's first document stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dataplane.arrays import Int64


@dataclass(frozen=True)
class Clusters:
    """Documents with near-duplicates, and their clusters."""

    documents: Int64
    """Numbers in the corpus, ascending."""
    firsts: Int64
    """The first document in the cluster, for every document."""

    @property
    def dropped(self) -> Int64:
        """Return the documents that are not the first in their cluster."""
        dropped: Int64 = self.documents[self.documents != self.firsts]
        return dropped

    @property
    def count(self) -> int:
        return len(self.documents) - len(self.dropped)


def connect_clusters(pairs: Callable[[], Iterable[Any]]) -> Clusters:
    """Connect pairs into clusters; pair blocks are read twice."""
    documents = np.zeros(0, np.int64)
    for block in pairs():
        documents = np.unique(np.concatenate([documents, block["first"], block["second"]]))
    labels = np.arange(len(documents))
    for block in pairs():
        connect(labels, *(np.searchsorted(documents, block[name]) for name in PAIR_ENDS))
    return Clusters(documents, documents[labels])


PAIR_ENDS = ("first", "second")


def connect(labels: Int64, first_indices: Int64, second_indices: Int64) -> None:
    """Join clusters in `labels`, where a label is the smallest index in the cluster."""
    while True:
        first_labels, second_labels = labels[first_indices], labels[second_indices]
        differ = first_labels != second_labels
        if not differ.any():
            return
        first_labels, second_labels = first_labels[differ], second_labels[differ]
        smaller = np.minimum(first_labels, second_labels)
        larger = np.maximum(first_labels, second_labels)
        np.minimum.at(labels, larger, smaller)
        while (is_stale := labels[labels] != labels).any():
            labels[is_stale] = labels[labels[is_stale]]
