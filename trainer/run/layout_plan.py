"""The file that `trainer plan` writes and `trainer run --layout` takes.

planned: {model: 5f1c…, gpus: 512, hardware: h100#9a2e…, executable: true, phases: […]}
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
from ...console.config import OneOf
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
"""Keys of a run that a plan sets."""


@dataclass(frozen=True, kw_only=True)
class PlannedPhase:
    name: str
    seq_len: int
    """Tokens of a row."""
    batch_tokens: int
    """Tokens of a step."""
    seconds: float
    """Predicted seconds of a step."""
    memory: int
    """Predicted bytes of a rank of the fullest stage, at the highest moment of a step."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The model, batches and cluster of a plan."""

    model: str
    """Hash of the model's configuration."""
    gpus: int
    """Ranks of the run."""
    hardware: str
    """Hardware file, with the digest of its figures."""
    executable: bool
    """False if the plan has choices that only the simulation knows, or is for modules that are not
    ours."""
    phases: tuple[PlannedPhase, ...]
    module: str | None = None
    """package:function of modules that are not ours. They have rows instead of tokens."""


@dataclass(frozen=True, kw_only=True)
class LayerSpan:
    """Neighbouring layers that run alike."""

    layers: tuple[int, int]
    """First and last layer."""
    recompute: Rule
    reshard: bool | None = None
    """False: weights stay gathered from the forward to the backward pass (FSDP2)."""
    shard: int | None = None
    """Ranks that share one copy of the state (FSDP2). None: those of the engine."""
    sequence: bool = False
    """True: the tensor ranks work as context ranks, with whole weights. Simulated only."""

    def __post_init__(self) -> None:
        first, last = self.layers
        if not 0 <= first <= last:
            what = f"first and last layer, not {list(self.layers)}"
            raise ConfigProblems([ConfigProblem("layers", what)])


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Prediction for the first planned phase."""

    seconds: float
    """Seconds of a step."""
    bound: float
    """No plan of this layout takes less, by the same costs."""
    by: Mapping[str, float]
    """Seconds by part, of the busiest stage."""
    memory: int
    """Bytes of a rank of the fullest stage, at the highest moment of the phase with the most."""
    memory_by: Mapping[str, int]
    """Bytes by part."""
    estimated: tuple[str, ...] = ()
    """Kernels without a measured rate, priced by their bytes and operations."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Measurement of the first planned phase by `trainer tune`."""

    seconds: float
    """Median seconds of a step."""
    memory: int | None
    """Bytes of tensors on the fullest rank."""
    date: str
    """Date of the measurement."""


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """A layout with the choices of each layer, and its prediction."""

    planned: Planned
    layout: LayoutConfig
    engine: Annotated[EngineConfig, OneOf(ENGINES, tag="kind")]
    micro_batch_tokens: int
    layers: tuple[LayerSpan, ...]
    predicted: Predicted
    measured: Measured | None = None

    def __post_init__(self) -> None:
        wrong = [
            ConfigProblem(f"layers.{number}.layers", what)
            for number, what in _not_in_order(self.layers)
        ]
        if not self.layers:
            wrong.append(ConfigProblem("layers", "needs a span: the rule of each layer"))
        if wrong:
            raise ConfigProblems(wrong)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Recompute rule of each layer."""
        return tuple(
            span.recompute
            for span in self.layers
            for _ in range(span.layers[0], span.layers[1] + 1)
        )

    @property
    def own_shards(self) -> tuple[LayerShards, ...]:
        """Spans of layers that choose `reshard` or `shard`."""
        return tuple(
            LayerShards(layers=span.layers, reshard=span.reshard is not False, shard=span.shard)
            for span in self.layers
            if span.reshard is False or span.shard is not None
        )

    @property
    def engine_of_layers(self) -> EngineConfig:
        """The engine with the choices of the layers."""
        spans = self.own_shards
        return self.engine.with_layer_shards(spans) if spans else self.engine


def _not_in_order(spans: Sequence[LayerSpan]) -> Iterator[tuple[int, str]]:
    """Yield number and mistake of each span that does not begin where the one before it ends."""
    expected = 0
    for number, span in enumerate(spans):
        first, last = span.layers
        if first != expected:
            after = f" after {list(spans[number - 1].layers)}" if number else ""
            wrong = "leaves out" if first > expected else "repeats or reorders"
            yield (
                number,
                f"{list(span.layers)}{after} {wrong} layers: it must begin with layer {expected}",
            )
        expected = last + 1


def load_plan(file: str | Path) -> LayoutPlan:
    return reader.load(LayoutPlan, file)


def check_layers(plan: LayoutPlan, layers: int, file: str | Path) -> None:
    """Raise unless the spans of a plan's file end with the last of a model's layers."""
    last = plan.layers[-1].layers[1]
    if last != layers - 1:
        place = ("layers", len(plan.layers) - 1, "layers")
        what = f"{list(plan.layers[-1].layers)} must end with layer {layers - 1}, the model's last"
        _, lines = reader.read_yaml(file)
        raise ConfigError(str(file), [locate_problem(lines, place, what)])


def model_hash(model: ModelConfig) -> str:
    text = json.dumps(model_identity(model), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def settings(plan: LayoutPlan, file: str) -> dict[str, Any]:
    """Return the keys of a run that the plan sets, as their YAML has them."""
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
        "engine": reader.plain(plan.engine_of_layers),
        "micro_batch_tokens": plan.micro_batch_tokens,
        "recompute": [reader.plain(rule) for rule in plan.rules],
    }


def _check_shards(plan: LayoutPlan, file: str) -> None:
    """Raise if the engine has no choices of layers, or has them twice."""
    spans = plan.own_shards
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
    """Raise if the command line sets what the plan sets."""
    both = [word for word in overrides if word.partition("=")[0].split(".")[0] in SECTIONS]
    if both:
        raise MisuseError(
            f"--layout {file} sets {', '.join(SECTIONS)}, and so does {', '.join(both)}",
            hint="leave the override out, or change the plan's file",
        )
