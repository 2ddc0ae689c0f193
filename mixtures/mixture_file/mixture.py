"""The mixture: dataclasses of the YAML. `check.py` validates the values.

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

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Literal

from ...console.config import OneOf, added_field
from ..controllers import CONTROLLERS
from ..controllers.controller import Controller
from ..lr_shapes import DEFAULT_SHAPE, SHAPES
from ..lr_shapes.shape import LearningRate

Lr = Annotated[LearningRate, OneOf(SHAPES, tag="shape", default=DEFAULT_SHAPE)]
Control = Annotated[Controller, OneOf(CONTROLLERS, tag="kind")]
Weight = float | dict[Literal["from", "to"], float]
TEMPERATURE = "temperature"


@dataclass(frozen=True, kw_only=True)
class OrderSpec:
    """The order of a source that `tokenize sort` has sorted by a kept field."""

    by: str
    """The field."""
    rising: bool = True
    """Serve the lowest values first; false: the highest."""
    window: str = "10%"
    """Share of the source whose rows are shuffled together."""

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"window {self.window} is not a percentage such as 10%")

    @property
    def share(self) -> Fraction:
        """The window as a fraction; 0 if it is no percentage."""
        try:
            return Fraction(self.window.removesuffix("%")) / 100 * self.window.endswith("%")
        except ValueError:
            return Fraction(0)


@dataclass(frozen=True, kw_only=True)
class SourceSpec:
    """A dataset, under the name that phases use in their weights."""

    data: str
    """URL of the dataset. It is no part of the order: a mirror has the same order."""
    max_epochs: int = 1
    """Maximum number of epochs that the plan may take from the dataset."""
    generations: int | None = None
    """Use only the first generations of the dataset. Default: all that it has now."""
    order: OrderSpec | None = added_field(None)  # noqa: RUF009 (a field)
    """Serve the source by a kept field, in every epoch. Default: shuffled as a whole."""


@dataclass(frozen=True, kw_only=True)
class PhaseSpec:
    """A span of training with its own weights, sequence length, batch and learning rate."""

    tokens: int = 0
    """Tokens of the phase, over all sources; rounded to whole steps."""
    weights: Literal["proportional"] | dict[str, Weight] = field(default_factory=dict)
    """Share of each source in the phase's tokens; the shares sum to 1. A share is a number, or
    {from, to} for one that changes linearly over the phase. The name of an earlier phase replays
    that phase's mixture. `proportional` and {temperature: T} compute the shares of all sources
    from their sizes, in proportion to tokens ** (1 / T), with five decimals; of a source that would
    exceed `max_epochs`, all that is left, up to less than a row."""
    seq_len: int | None = None
    """Tokens of a row. Default: that of the phase before."""
    batch: int | None = None
    """Tokens of a step, rounded to whole rows. Default: that of the phase before."""
    lr: Lr = field(default_factory=SHAPES[DEFAULT_SHAPE])
    """Learning rate over the phase, in multiples of the run's peak."""
    control: Control | None = added_field(None)  # noqa: RUF009
    """What decides the shares while the run goes on, instead of `weights` alone. Each decision is
    recorded, so the run can be repeated exactly."""


@dataclass(frozen=True, kw_only=True)
class After:
    """The run that this mixture continues."""

    run: str
    """Folder or URL of the run."""
    step: int | None = None
    """First step of this mixture. Default: the step of the run's newest checkpoint."""
    reshuffle: bool = False
    """Serve the rest of each source's epoch in a new order, which this mixture's seed decides:
    other rows than those that the run would take next."""
    decisions: Literal["drop", "keep"] = added_field("drop")
    """Decisions that the run has made from this step on: drop them, or keep their shares, as a plan
    of this mixture's phases."""


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Sources, and the phases that draw from them."""

    sources: dict[str, SourceSpec] = field(default_factory=dict)
    """Datasets by name. Sources of the run that this mixture continues need not be repeated."""
    phases: dict[str, PhaseSpec] = field(default_factory=dict)
    """Phases by name, in the order of training."""
    seed: int = 0
    """Seed of every permutation."""
    isolate_documents: bool = True
    """Hide the documents of a row from each other."""
    chunk: int | None = None
    """Tokens that stay together when a source is shuffled: a multiple of every sequence length.
    Default: about 8 million, or a 256th of a smaller source."""
    window: int | None = None
    """Number of chunks whose rows are shuffled together. Default: 32, or an eighth of a smaller
    source."""
    without: tuple[str, ...] = added_field(())
    """Files of document ids (one a line, or a column `id`): their tokens have no weight in the
    loss. All rows stay in their places."""
    refill: bool = added_field(False)
    """Give each row with such documents the tokens of another row of its source, which the plan
    would not serve otherwise. All other rows stay in their places."""
    steps_by_length: bool = added_field(False)
    """Give each step rows of one length: it draws from sources that are packed to this length
    alone, and the model gets their bins as its rows. A step's tokens stay the same."""
    after: After | None = None
    """Continue the stream of another run: tokens that it consumed are not served again."""


@dataclass(frozen=True)
class SizedPhase:
    """A phase with the effective sequence length and batch; None where the mixture sets none."""

    name: str
    spec: PhaseSpec
    seq_len: int | None
    batch: int | None


def sized_phases(mixture: Mixture, seq_len: int | None, batch: int | None) -> Iterator[SizedPhase]:
    """Yield the phases in order; `seq_len` and `batch` apply before the first phase."""
    for name, spec in mixture.phases.items():
        seq_len = seq_len if spec.seq_len is None else spec.seq_len
        batch = batch if spec.batch is None else spec.batch
        yield SizedPhase(name, spec, seq_len, batch)


def endpoints(weight: Weight) -> tuple[float, float]:
    """Return a share at both ends of the phase."""
    if isinstance(weight, Mapping):
        return weight["from"], weight["to"]
    return weight, weight


def explicit_shares(phase: PhaseSpec) -> dict[str, Weight]:
    """Return the named shares of a phase; empty if they follow from source sizes."""
    return phase.weights if isinstance(phase.weights, dict) else {}


def find_temperature(phase: PhaseSpec, names: Container[str]) -> float | None:
    """Find the temperature that turns source sizes into a phase's shares; None for named shares.

    `names` holds all sources and phases, as one may be called `temperature`.
    """
    if not isinstance(phase.weights, dict):
        return 1.0
    value = phase.weights.get(TEMPERATURE)
    if len(phase.weights) != 1 or TEMPERATURE in names or value is None or isinstance(value, dict):
        return None
    return value


def exact_fraction(value: float) -> Fraction:
    """Convert a float to the decimal that was written: 0.1 becomes 1/10."""
    return Fraction(repr(value))
