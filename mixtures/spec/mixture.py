"""The mixture: the YAML that a person writes. check.py says what is wrong with one.

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

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Literal

from ...console.config import OneOf
from ..lr_shapes import DEFAULT_SHAPE, SHAPES
from ..lr_shapes.shape import LearningRate

Lr = Annotated[LearningRate, OneOf(SHAPES, tag="shape", default=DEFAULT_SHAPE)]
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


@dataclass(frozen=True, kw_only=True)
class PhaseSpec:
    """A span of training with its own weights, sequence length, batch and learning rate."""

    tokens: int = 0
    """How many tokens the phase takes, of all sources together: rounded to whole updates."""
    weights: dict[str, Weight] = field(default_factory=dict)
    """The share of each source in the phase's tokens; together 1. A number, or {from, to} for a
    share that changes evenly. The name of an earlier phase replays its mixture."""
    seq_len: int | None = None
    """Tokens of a row; the phase before's, if left out."""
    batch: int | None = None
    """Tokens of an update; the phase before's, if left out."""
    lr: Lr = field(default_factory=SHAPES[DEFAULT_SHAPE])
    """The learning rate, in multiples of the run's peak."""


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

    sources: dict[str, SourceSpec] = field(default_factory=dict)
    """Datasets by name. Those of the run that this mixture continues need not be repeated."""
    phases: dict[str, PhaseSpec] = field(default_factory=dict)
    """In the order in which they are trained on."""
    seed: int = 0
    """Decides every permutation."""
    isolate_documents: bool = True
    """Whether the documents of a row are kept from seeing each other."""
    chunk: int | None = None
    """Tokens that stay together when a source is shuffled: a multiple of every sequence length.
    About 8 million, or a 256th of a smaller source, if left out."""
    window: int | None = None
    """Chunks among which rows are shuffled: 32, or an eighth of a smaller source, if left out."""
    after: After | None = None
    """Continue another run's stream: what it consumed is not served again."""


@dataclass(frozen=True)
class SizedPhase:
    """A phase with the sequence length and batch that hold in it; None where none was given."""

    name: str
    spec: PhaseSpec
    seq_len: int | None
    batch: int | None


def sized_phases(mixture: Mixture, seq_len: int | None, batch: int | None) -> Iterator[SizedPhase]:
    """The phases in order, after one with this sequence length and batch."""
    for name, spec in mixture.phases.items():
        seq_len = seq_len if spec.seq_len is None else spec.seq_len
        batch = batch if spec.batch is None else spec.batch
        yield SizedPhase(name, spec, seq_len, batch)


def endpoints(weight: Weight) -> tuple[float, float]:
    """A share at the phase's beginning and at its end."""
    if isinstance(weight, Mapping):
        return weight["from"], weight["to"]
    return weight, weight


def exact_fraction(value: float) -> Fraction:
    """Return the decimal as it was written: 0.1 is one tenth."""
    return Fraction(repr(value))
