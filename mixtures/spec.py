"""The mixture: the YAML that a person writes.

seed: 7
sources:
  web:  {data: s3://corpus/web}
  math: {data: s3://corpus/math, max_epochs: 2}
phases:
  stable:
    tokens: 900B
    seq_len: 4096
    batch: 4M
    weights: {web: 1}
    lr: {warmup: 8B}
  anneal:
    tokens: 100B
    weights: {stable: 0.6, math: 0.4}
    lr: {peak: 0.75, warmup: 8B, shape: cosine}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Weight = float | dict[Literal["from", "to"], float]


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """A dataset, under the name by which phases weigh it."""

    data: str
    """The dataset's URL."""
    max_epochs: int = 1
    """How many times the plan may go through it."""
    generations: int | None = None
    """Use the dataset's first generations only; all that it has now, if left out."""

    def __post_init__(self) -> None:
        if self.max_epochs < 1:
            raise ValueError(f"max_epochs is {self.max_epochs}; it must be at least 1")
        if self.generations is not None and self.generations < 1:
            raise ValueError(f"generations is {self.generations}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """The learning rate over a phase, in multiples of the run's peak."""

    peak: float = 1.0
    """Where the warm-up ends."""
    warmup: int = 0
    """Tokens over which the rate rises linearly to `peak`."""
    warmup_from: float = 0.0
    """Where the warm-up begins."""
    shape: Literal["constant", "linear", "cosine", "exponential", "wsd"] = "constant"
    """How it goes on after the warm-up. wsd: constant, then linear over the last `decay` tokens."""
    end: float = 0.0
    """Where the phase ends, for every shape but constant."""
    decay: int | None = None
    """Tokens of wsd's decay."""

    def __post_init__(self) -> None:
        for name in ("peak", "warmup", "warmup_from", "end"):
            value = getattr(self, name)
            if value < 0 or not math.isfinite(value):
                raise ValueError(f"{name} is {value}; it must be a number that is not negative")
        if self.shape == "exponential" and not (self.end > 0 and self.peak > 0):
            raise ValueError("exponential decay needs an `end` and a `peak` above 0")
        if (self.shape == "wsd") != (self.decay is not None):
            raise ValueError("`decay` (tokens) belongs to shape wsd, which needs it")


@dataclass(frozen=True, kw_only=True)
class PhaseSpec:
    """A span of training with its own weights, sequence length, batch and learning rate."""

    tokens: int
    """How many tokens the phase takes, of all sources together."""
    weights: dict[str, Weight]
    """The share of each source in the phase's tokens; together 1. A number, or {from, to} for a
    share that changes evenly. The name of an earlier phase replays its mixture."""
    seq_len: int | None = None
    """Tokens of a row; the phase before's, if left out."""
    batch: int | None = None
    """Tokens of an update; the phase before's, if left out."""
    lr: LearningRate = field(default_factory=LearningRate)
    """The learning rate, in multiples of the run's peak."""

    def __post_init__(self) -> None:
        for name in ("tokens", "seq_len", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value:,}; it must be at least 1")
        if not self.weights:
            raise ValueError("weights is empty; it names the sources of the phase")


@dataclass(frozen=True, kw_only=True)
class After:
    """The run from which this mixture branches."""

    run: str
    """The run's folder."""
    step: int | None = None
    """The first step that is this mixture's; where the run's newest checkpoint stands, if left
    out."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sources, and the phases that draw from them."""

    sources: dict[str, SourceSpec]
    """Datasets by name."""
    phases: dict[str, PhaseSpec]
    """In the order in which they are trained on."""
    seed: int = 0
    """Decides every permutation."""
    isolate_documents: bool = True
    """Whether the documents of a row are kept from seeing each other."""
    chunk: int | None = None
    """Tokens that stay together when a source is shuffled: a multiple of every sequence length.
    About a million, if left out."""
    window: int | None = None
    """Chunks among which rows are shuffled."""
    after: After | None = None
    """Continue another run's stream: what it consumed is not served again."""

    def __post_init__(self) -> None:
        for name in ("chunk", "window"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value:,}; it must be at least 1")
        if not self.phases:
            raise ValueError("phases is empty; a mixture needs at least one")


def ends(weight: Weight) -> tuple[float, float]:
    """A share at the phase's beginning and at its end."""
    if isinstance(weight, Mapping):
        return weight["from"], weight["to"]
    return weight, weight
