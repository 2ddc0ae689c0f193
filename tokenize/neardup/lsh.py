"""Locality-sensitive hashing: settings, and the probability to find a pair.

A document is a set of word runs, `ngram` words each. Its signature has one number per permutation;
two documents agree in a number with probability s, their Jaccard similarity. Bands of `rows`
numbers are compared: a pair is found if all rows in at least one band agree, which has the
probability 1 − (1 − s^rows)^bands.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

SHOWN = (0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
"""Similarities in the printed curve."""
MAX_PERMUTATIONS = 4096


@dataclass(frozen=True, kw_only=True)
class LshConfig:
    ngram: int = 5
    """Words per run; documents with fewer words are one run."""
    bands: int = 14
    """Bands per signature; a pair is found if one band agrees."""
    rows: int = 8
    """Numbers per band."""
    seed: int = 1
    """Seed for the permutations."""

    def __post_init__(self) -> None:
        for name in ("ngram", "bands", "rows"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.permutations > MAX_PERMUTATIONS:
            raise ValueError(
                f"bands × rows is {self.permutations}; it must be at most {MAX_PERMUTATIONS}"
            )
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"seed is {self.seed}; it must be from 0 to 2^63 - 1")

    @property
    def permutations(self) -> int:
        return self.bands * self.rows

    def probability(self, similarity: float) -> float:
        """Return the probability that a pair is found."""
        return float(1 - (1 - similarity**self.rows) ** self.bands)

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Return (similarity, probability to find a pair) for the printed curve."""
        return [(similarity, self.probability(similarity)) for similarity in SHOWN]


def choose_bands(threshold: float, permutations: int) -> tuple[int, int]:
    """Choose the bands and rows whose probability curve is closest to a step at the threshold: the
    area between curve and step is smallest."""
    similarity = (np.arange(1000) + 0.5) / 1000
    step = similarity >= threshold
    best = (np.inf, 1, 1)
    for rows in range(1, permutations + 1):
        bands = permutations // rows
        error = float(np.abs(1 - (1 - similarity**rows) ** bands - step).mean())
        best = min(best, (error, bands, rows))
    return best[1:]
