"""Decide which documents of a corpus stay: by a drop list, then by a filter.

Each dropped document is counted by its reason. All readers of a build see the same documents: a
duplicate is a duplicate of a document that stays.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ...console.errors import InputError
from ..files.input_file import File
from ..sources.format import BadRecord, Texts
from .drop_list import StoredDrops
from .filters import MOST_REASONS, Filter
from .read_stats import ReadStats

DROPPED = "dropped by "
"""Beginning of the names of the counts; manifests store them."""
BY_LIST = DROPPED + "the list"
BY_FILTER = DROPPED + "the filter: "


@dataclass(frozen=True)
class Screen:
    """The rules by which documents stay."""

    drops: StoredDrops | None = None
    filter: Filter | None = None

    def __bool__(self) -> bool:
        return self.drops is not None or self.filter is not None

    def kept(self, file: File, texts: Texts, stats: ReadStats) -> list[int]:
        """Return the indices of the texts that stay; count the others."""
        kept = list(range(len(texts.texts)))
        if self.drops is not None:
            named = self.drops.drops(file.fingerprint, texts.positions, texts.ids)
            kept = [k for k in kept if not named[k]]
            stats.counts[BY_LIST] += sum(named)
        if self.filter is not None:
            kept = self._filtered(self.filter, file, texts, kept, stats.counts)
        return kept

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
