"""Counts of what was read from a corpus, and messages about bad records."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ..sources.format import BadRecord

BAD = "bad: "
"""Beginning of the counts of bad records."""
MAX_MESSAGES = 100
"""Bad records that a task names; it counts all of them."""


@dataclass
class ReadStats:
    """Counts and messages of one task. Manifests store them, and the names of the counts."""

    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    """Bad records, as text."""
    notes: list[str] = field(default_factory=list)
    """Correct but surprising documents: texts that name special tokens."""

    @property
    def bad(self) -> int:
        """Return the number of records that could not be read, or have no ids."""
        return sum(count for name, count in self.counts.items() if name.startswith(BAD))

    def add_bad(self, problem: BadRecord) -> None:
        self.counts[BAD + problem.kind] += 1
        if len(self.problems) < MAX_MESSAGES:
            self.problems.append(str(problem))
