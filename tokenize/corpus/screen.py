"""Decide which documents of a corpus stay: by drop lists, then a filter, then decontamination.

Every dropped document is counted under its reason. All readers of a build see the same documents: a
duplicate is a duplicate of a document that stays.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...console.errors import InputError
from ..files.input_file import File
from ..sources.format import BadRecord, Texts
from . import decontaminate, genome
from .decontaminate import StoredEvaluations
from .drop_list import StoredDrops
from .filters import MAX_REASONS, Filter
from .read_stats import ReadStats

DROPPED = "dropped by "
"""Prefix in count names; manifests store them."""
BY_LIST = DROPPED + "the list"
BY_FILTER = DROPPED + "the filter: "
NAMED_BY = "named by the list "
"""Prefix in counts by list: a document that several lists name counts under all."""


@dataclass(frozen=True)
class Screen:
    """Rules that drop documents."""

    drops: StoredDrops | None = None
    filter: Filter | None = None
    evaluations: StoredEvaluations | None = None

    def __bool__(self) -> bool:
        return any(rule is not None for rule in (self.drops, self.filter, self.evaluations))

    def apply(self, file: File, texts: Texts, stats: ReadStats) -> Texts:
        """Return the texts that stay; count dropped ones."""
        kept = list(range(len(texts.texts)))
        if self.drops is not None:
            is_named = np.zeros(len(kept), bool)
            for drop_list in self.drops.lists:
                matches = drop_list.find(file.fingerprint, texts.positions, texts.ids)
                stats.counts[NAMED_BY + drop_list.name] += int(matches.sum())
                is_named |= matches
            kept = [k for k in kept if not is_named[k]]
            stats.counts[BY_LIST] += int(is_named.sum())
        if self.filter is not None:
            kept = self._apply_filter(self.filter, file, texts, kept, stats.counts)
        if len(kept) < len(texts.texts):
            texts = texts.select(kept)
        if self.evaluations is not None:
            texts = self.evaluations.apply(file, texts, stats)
        return texts

    def _apply_filter(
        self, rule: Filter, file: File, texts: Texts, kept: list[int], counts: Counter[str]
    ) -> list[int]:
        no_fields: dict[str, Any] = {}
        rows = None if texts.fields is None else texts.fields.to_pylist()
        stay = []
        for k in kept:
            fields = no_fields if rows is None else rows[k]

            def where(k: int = k) -> str:
                return BadRecord("", "", file.name, texts.positions[k]).where()

            reason = rule.reason(texts.texts[k], fields, where)
            if reason is None:
                stay.append(k)
                continue
            counts[BY_FILTER + reason] += 1
            num_reasons = sum(name.startswith(BY_FILTER) for name in counts)
            if num_reasons > MAX_REASONS:
                raise InputError(
                    f"the filter {rule.name} gave more than {MAX_REASONS} different reasons",
                    where=where(),
                    hint="give the same reason to all documents that are dropped alike",
                )
        return stay


def count_documents_read(num_kept: int, counts: Counter[str]) -> int:
    """Return how many documents were read, if `num_kept` remain after the rules."""
    num_dropped = sum(count for name, count in counts.items() if name.startswith(DROPPED))
    num_added = counts[decontaminate.PIECE_COUNT] + counts[genome.ADDED_COUNT]
    return num_kept + num_dropped + counts[decontaminate.CUT_COUNT] - num_added
