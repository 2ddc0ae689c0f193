"""Clusters of documents: sets that pairs connect. The first document of a cluster stays."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dataplane.arrays import Int64


@dataclass(frozen=True)
class Clusters:
    """Documents that have near-duplicates."""

    documents: Int64
    """Their numbers in the corpus, ascending."""
    firsts: Int64
    """The first document of the cluster of each."""

    @property
    def dropped(self) -> Int64:
        """Return the documents that are not the first of their cluster."""
        dropped: Int64 = self.documents[self.documents != self.firsts]
        return dropped

    @property
    def count(self) -> int:
        return len(self.documents) - len(self.dropped)


def clusters_of(pairs: Callable[[], Iterable[Any]]) -> Clusters:
    """Return the clusters of pairs, which are read twice, a block at a time."""
    documents = np.zeros(0, np.int64)
    for block in pairs():
        documents = np.unique(np.concatenate([documents, block["first"], block["second"]]))
    labels = np.arange(len(documents))
    for block in pairs():
        connect(labels, *(np.searchsorted(documents, block[name]) for name in PAIR_ENDS))
    return Clusters(documents, documents[labels])


PAIR_ENDS = ("first", "second")


def connect(labels: Int64, one: Int64, other: Int64) -> None:
    """Join the clusters of pairs. A label is the smallest index of a cluster."""
    while True:
        left, right = labels[one], labels[other]
        apart = left != right
        if not apart.any():
            return
        low, high = np.minimum(left, right)[apart], np.maximum(left, right)[apart]
        np.minimum.at(labels, high, low)
        while (further := labels[labels] != labels).any():
            labels[further] = labels[labels[further]]
