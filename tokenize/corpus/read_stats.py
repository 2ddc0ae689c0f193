"""Counts while a corpus is read, and messages about bad records."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..sources.format import BadRecord

BAD = "bad: "
"""Prefix in the names of bad-record counts."""
MAX_MESSAGES = 100
"""Bad records that a task names; it counts all of them."""


@dataclass
class ReadStats:
    """One task's counts and messages. Manifests store them, with the counts' names."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    """Bad records, as text."""
    notes: list[str] = field(default_factory=list)
    """Correct but surprising documents: texts that name special tokens."""

    @property
    def bad(self) -> int:
        """Return how many records could not be read, or have no ids."""
        return sum(count for name, count in self.counts.items() if name.startswith(BAD))

    def add_bad(self, problem: BadRecord) -> None:
        self.counts[BAD + problem.kind] += 1
        if len(self.problems) < MAX_MESSAGES:
            self.problems.append(str(problem))
