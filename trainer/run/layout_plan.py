"""The file that `trainer plan` writes and `trainer run --layout` takes.

planned: {model: 5f1c…, gpus: 512, hardware: h100#9a2e…, precision: bf16, optimizer: adamw, …}
layout: {pp: 2, cuts: [17]}
engine: {kind: fsdp2, gather: step}
micro_batch_tokens: 8192
layers: [{layers: [0, 29], recompute: none}, {layers: [30, 31], recompute: block, reshard: false}]
predicted: {seconds: 0.71, memory: 52.1GiB, by: {…}}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ...console import config as reader
from ...console.config import OneOf, added_field
from ...console.errors import ConfigError, ConfigProblem, ConfigProblems, LayoutError, MisuseError
from ...console.explain import locate_problem
from ...models.config.options.recompute import Rule
from ..engines import ENGINES
from ..engines.config import EngineConfig
from ..engines.shard_groups import LayerShards
from ..layout.config import LayoutConfig
from .config import model_identity

if TYPE_CHECKING:
    from ...models.config.config import ModelConfig

SECTIONS = ("layout", "engine", "micro_batch_tokens", "recompute")
"""Keys in run.yaml that a plan sets."""


@dataclass(frozen=True, kw_only=True)
class PlannedPhase:
    name: str
    seq_len: int
    """Tokens per row."""
    batch_tokens: int
    """Tokens per step."""
    seconds: float
    """Predicted seconds per step."""
    memory: int
    """Predicted peak bytes on a rank in the fullest stage."""


@dataclass(frozen=True, kw_only=True)
class PlannedMean:
    """Steps of a phase whose rows have several lengths, each with a phase of its own here."""

    phase: str
    seconds: float
    """Predicted seconds per step, each length by its share of the steps."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The model, batches and cluster for which a plan was made."""

    model: str
    """Hash of the model's configuration."""
    gpus: int
    """Ranks in the run."""
    hardware: str
    """Hardware file, with the digest of its figures."""
    executable: bool
    """False if the plan has choices that only the simulation knows, or is for foreign modules."""
    phases: tuple[PlannedPhase, ...]
    module: str | None = None
    """package:function that builds foreign modules. They have rows instead of tokens."""
    precision: str | None = reader.added_field(None)
    """Precision of the run; None, as the next two, in an older file."""
    optimizer: str | None = reader.added_field(None)
    """Kind of optimizer."""
    device: str | None = reader.added_field(None)
    """Kind of device."""
    means: tuple[PlannedMean, ...] = reader.added_field(())
    """Mean steps, where steps have rows of several lengths."""


@dataclass(frozen=True, kw_only=True)
class LayerSpan:
    """Neighbouring layers that run alike."""

    layers: tuple[int, int]
    """First and last layer."""
    recompute: Rule
    reshard: bool | None = None
    """False: weights stay gathered from the forward to the backward pass (FSDP2)."""
    shard: int | None = None
    """Ranks that share a copy of the state (FSDP2). None: as in the engine's settings."""
    sequence: bool = False
    """True: the tensor ranks work as context ranks, with whole weights. Simulated only."""

    def __post_init__(self) -> None:
        first, last = self.layers
        if not 0 <= first <= last:
            message = f"first and last layer, not {list(self.layers)}"
            raise ConfigProblems([ConfigProblem("layers", message)])


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Prediction for the first planned phase."""

    seconds: float
    """Seconds per step."""
    bound: float
    """Lower bound in seconds for all plans with this layout, by the same costs."""
    by: Mapping[str, float]
    """Seconds by component, in the busiest stage."""
    memory: int
    """Peak bytes on a rank in the fullest stage, in the phase with the highest peak."""
    memory_by: Mapping[str, int]
    """Bytes by component."""
    estimated: tuple[str, ...] = ()
    """Kernels without a measured rate, priced by their bytes and operations."""
    outside: tuple[str, ...] = added_field(())
    """Rates of the nearest measured size, which is more than twice or less than half."""
    error: float | None = added_field(None)
    """Mean relative error of such predictions (`bands` of the hardware file)."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurement of the first planned phase by `trainer tune`."""

    seconds: float
    """Median seconds per step."""
    memory: int | None
    """Bytes in tensors on the fullest rank."""
    date: str
    """Date of the measurement."""


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """A layout with choices by layer, and its prediction."""

    planned: Planned
    layout: LayoutConfig
    engine: Annotated[EngineConfig, OneOf(ENGINES, tag="kind")]
    micro_batch_tokens: int
    layers: tuple[LayerSpan, ...]
    predicted: Predicted
    measured: Measured | None = None

    def __post_init__(self) -> None:
        problems = [
            ConfigProblem(f"layers.{number}.layers", message)
            for number, message in _order_problems(self.layers)
        ]
        if not self.layers:
            problems.append(ConfigProblem("layers", "needs a span: the rule of each layer"))
        if problems:
            raise ConfigProblems(problems)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Recompute rules by layer."""
        return tuple(
            span.recompute
            for span in self.layers
            for _ in range(span.layers[0], span.layers[1] + 1)
        )

    @property
    def layer_shards(self) -> tuple[LayerShards, ...]:
        """Spans that choose `reshard` or `shard`."""
        return tuple(
            LayerShards(layers=span.layers, reshard=span.reshard is not False, shard=span.shard)
            for span in self.layers
            if span.reshard is False or span.shard is not None
        )

    @property
    def resolved_engine(self) -> EngineConfig:
        """The engine with the layers' choices."""
        spans = self.layer_shards
        return self.engine.replace_layer_shards(spans) if spans else self.engine


def _order_problems(spans: Sequence[LayerSpan]) -> Iterator[tuple[int, str]]:
    """Yield number and message for spans that do not begin where their predecessor ends."""
    expected = 0
    for number, span in enumerate(spans):
        first, last = span.layers
        if first != expected:
            after = f" after {list(spans[number - 1].layers)}" if number else ""
            mistake = "leaves out" if first > expected else "repeats or reorders"
            yield (
                number,
                f"{list(span.layers)}{after} {mistake} layers: it must begin with layer {expected}",
            )
        expected = last + 1


def load_plan(file: str | Path) -> LayoutPlan:
    return reader.load(LayoutPlan, file)


def check_values(plan: LayoutPlan, layers: int, file: str | Path) -> None:
    """Raise unless a plan's spans end with the model's last layer, and its micro-batches have whole
    rows of a phase."""
    problems: dict[tuple[str | int, ...], str] = {}
    last_span = list(plan.layers[-1].layers)
    if last_span[1] != layers - 1:
        message = f"{last_span} must end with layer {layers - 1}, the model's last"
        problems["layers", len(plan.layers) - 1, "layers"] = message
    cp = plan.layout.cp
    lengths = sorted({phase.seq_len // cp for phase in plan.planned.phases})
    if all(plan.micro_batch_tokens % length for length in lengths):
        rows = " or ".join(f"{length:,}" for length in lengths)
        share = f" (cp {cp} divides the rows)" if cp > 1 else ""
        message = f"{plan.micro_batch_tokens} must be a multiple of {rows}, the tokens of a row"
        problems[("micro_batch_tokens",)] = f"{message}{share}"
    if problems:
        _, lines = reader.read_yaml(file)
        located = [locate_problem(lines, path, text) for path, text in problems.items()]
        raise ConfigError(str(file), located)


def model_hash(model: ModelConfig) -> str:
    return hash_identity(model_identity(model))


def hash_identity(identity: Mapping[str, Any]) -> str:
    content = json.dumps(identity, sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def run_settings(plan: LayoutPlan, file: str) -> dict[str, Any]:
    """Return the keys in run.yaml that the plan sets."""
    if plan.planned.module is not None:
        raise LayoutError(
            f"{file} plans the modules of {plan.planned.module}: they are not a model of "
            "headrace, and `trainer run` cannot execute them",
            hint="read it with `trainer plan show`; for a run, plan with --model",
        )
    simulated = [f"{span.layers[0]}–{span.layers[1]}" for span in plan.layers if span.sequence]
    if simulated or not plan.planned.executable:
        raise LayoutError(
            f"{file} is a simulated plan: tensor ranks cannot work as context ranks in some layers "
            f"(`sequence`, layers {', '.join(simulated) or 'none'})",
            hint="plan again without --simulate",
        )
    _check_shards(plan, file)
    return {
        "layout": reader.plain(plan.layout),
        "engine": reader.plain(plan.resolved_engine),
        "micro_batch_tokens": plan.micro_batch_tokens,
        "recompute": [reader.plain(rule) for rule in plan.rules],
    }


def _check_shards(plan: LayoutPlan, file: str) -> None:
    """Raise if the engine has no choices by layer, or the plan states them twice."""
    spans = plan.layer_shards
    if spans and not plan.engine.chooses_layers:
        raise LayoutError(
            f"{file}: layers {list(spans[0].layers)} choose `reshard` or `shard`, which "
            f"engine.kind={plan.engine.kind} does not have",
            hint="set engine.kind=fsdp2, or leave them out",
        )
    if spans and plan.engine.layer_shards:
        raise LayoutError(
            f"{file}: both engine.layers and `layers` choose `reshard` or `shard`",
            hint="leave engine.layers out",
        )


def check_overrides(overrides: Sequence[str], file: str) -> None:
    """Raise if the command line sets keys that the plan sets."""
    both = [word for word in overrides if word.partition("=")[0].split(".")[0] in SECTIONS]
    if both:
        raise MisuseError(
            f"--layout {file} sets {', '.join(SECTIONS)}, and so does {', '.join(both)}",
            hint="leave the override out, or change the plan's file",
        )
