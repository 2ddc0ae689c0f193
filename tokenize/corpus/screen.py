"""Decide which documents of a corpus stay: by a drop list, then by a filter, then by evaluations
that they must not contain.

Each dropped document is counted by its reason. All readers of a build see the same documents: a
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
from . import decontaminate
from .decontaminate import StoredEvaluations
from .drop_list import StoredDrops
from .filters import MOST_REASONS, Filter
from .read_stats import ReadStats

DROPPED = "dropped by "
"""Beginning of the names of the counts; manifests store them."""
BY_LIST = DROPPED + "the list"
BY_FILTER = DROPPED + "the filter: "
NAMED_BY = "named by the list "
"""Beginning of the counts of single lists: a document that several lists name counts for each."""


@dataclass(frozen=True)
class Screen:
    """The rules by which documents stay."""

    drops: StoredDrops | None = None
    filter: Filter | None = None
    evaluations: StoredEvaluations | None = None

    def __bool__(self) -> bool:
        return any(rule is not None for rule in (self.drops, self.filter, self.evaluations))

    def apply(self, file: File, texts: Texts, stats: ReadStats) -> Texts:
        """Return the texts that stay; count the others."""
        kept = list(range(len(texts.texts)))
        if self.drops is not None:
            named = np.zeros(len(kept), bool)
            for each in self.drops.lists:
                found = each.find(file.fingerprint, texts.positions, texts.ids)
                stats.counts[NAMED_BY + each.name] += int(found.sum())
                named |= found
            kept = [k for k in kept if not named[k]]
            stats.counts[BY_LIST] += int(named.sum())
        if self.filter is not None:
            kept = self._filtered(self.filter, file, texts, kept, stats.counts)
        if len(kept) < len(texts.texts):
            texts = texts.select(kept)
        if self.evaluations is not None:
            texts = self.evaluations.apply(file, texts, stats)
        return texts

    def _filtered(
        self, rule: Filter, file: File, texts: Texts, kept: list[int], counts: Counter[str]
    ) -> list[int]:
        nothing: dict[str, Any] = {}
        rows = None if texts.fields is None else texts.fields.to_pylist()
        stay = []
        for k in kept:
            fields = nothing if rows is None else rows[k]

            def where(k: int = k) -> str:
                return BadRecord("", "", file.name, texts.positions[k]).where()

            why = rule.reason(texts.texts[k], fields, where)
            if why is None:
                stay.append(k)
                continue
            counts[BY_FILTER + why] += 1
            reasons = sum(name.startswith(BY_FILTER) for name in counts)
            if reasons > MOST_REASONS:
                raise InputError(
                    f"the filter {rule.name} gave more than {MOST_REASONS} different reasons",
                    where=where(),
                    hint="give the same reason to all documents that are dropped alike",
                )
        return stay


def documents_read(left: int, counts: Counter[str]) -> int:
    """Return the number of documents before the rules, given how many are left."""
    dropped = sum(count for name, count in counts.items() if name.startswith(DROPPED))
    return left + dropped + counts[decontaminate.CUT] - counts[decontaminate.PIECES]
