"""Controller odm: Online Data Mixing (arXiv 2312.02406), a bandit that prefers high losses.

Turn t of K sources with shares π, from the mean losses ℓ since the turn before:

    R_i ← α·R_i + (1 − α)·ℓ_i / π_i                         of sources that gave rows
    ε_t = min(1/K, √(ln K / (K·t)))                          ε_0 = 1/K
    π_i ← (1 − K·ε_t) · exp(ε_{t−1}·R_i) / Σ_j exp(ε_{t−1}·R_j) + ε_t

A step draws from all sources, so a turn rewards each of them; the paper's draws from one. ε_1 is
1/K or little less: the first turn explores.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from .controller import Controller, Observed, Shares, State


@dataclass(frozen=True, kw_only=True)
class OnlineDataMixing(Controller):
    """Online Data Mixing: shares grow with the losses of their sources."""

    kind: Literal["odm"] = "odm"
    """Online Data Mixing (arXiv 2312.02406), from the training losses of the sources."""
    every: int = 100
    """Steps between two decisions."""
    warmup: int = 0
    """Steps of the phase with its own weights, before the losses of a first turn count."""
    smoothing: float = 0.9
    """α of the moving average of rewards: 0 keeps the last one alone."""

    def is_due(self, steps: int, observed: Observed, state: State) -> bool:
        return steps > self.warmup and (steps - self.warmup) % self.every == 0

    def decide(self, shares: Shares, observed: Observed, state: State) -> tuple[Shares, State]:
        turn = state.get("turn", 0) + 1
        rewards = {source: state.get("rewards", {}).get(source, 0.0) for source in shares}
        for source, loss in observed.losses.items():
            if shares.get(source):
                reward = loss / shares[source]
                rewards[source] = self.smoothing * rewards[source] + (1 - self.smoothing) * reward
        count, largest = len(shares), max(rewards.values())
        rate, rate_before = explore(count, turn), explore(count, turn - 1)
        scores = {
            source: math.exp(rate_before * (reward - largest)) for source, reward in rewards.items()
        }
        total = math.fsum(scores.values())
        decided = {
            source: (1 - count * rate) * score / total + rate for source, score in scores.items()
        }
        return decided, {"turn": turn, "rewards": rewards}

    def bounds(self, shares: Shares, steps: int) -> Mapping[str, tuple[float, float]]:
        turns = max(0, steps - 1 - self.warmup) // self.every
        if not turns:
            return {source: (share, share) for source, share in shares.items()}
        rate = explore(len(shares), turns)
        largest = 1 - (len(shares) - 1) * rate
        return {source: (min(share, rate), max(share, largest)) for source, share in shares.items()}

    def problems(self) -> Iterator[tuple[str, str]]:
        if self.every < 1:
            yield "every", f"is {self.every}; it must be at least 1"
        if self.warmup < 0:
            yield "warmup", f"is {self.warmup}; it must be at least 0"
        if not 0 <= self.smoothing < 1:
            yield "smoothing", f"is {self.smoothing:g}; it must be at least 0 and below 1"


def explore(count: int, turn: int) -> float:
    """Return the smallest share of `count` sources at a turn."""
    if turn == 0:
        return 1 / count
    return min(1 / count, math.sqrt(math.log(count) / (count * turn)))
