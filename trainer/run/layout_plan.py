"""The file that `trainer plan` writes and `trainer run --layout` takes.

planned: {model: 5f1c…, gpus: 512, hardware: h100#9a2e…, executable: true, phases: […]}
layout: {pp: 2, cuts: [17]}
engine: {kind: fsdp2, gather: step}
micro_batch_tokens: 8192
layers: [{layers: [0, 29], recompute: none}, {layers: [30, 31], recompute: block}]
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
from ...console.errors import LayoutError, MisuseError
from ...models.layers.recompute import Rule
from ..engines import ENGINES
from ..engines.engine import EngineConfig
from ..layout.config import LayoutConfig
from .config import model_identity

if TYPE_CHECKING:
    from ...models.config import ModelConfig
    from .job import Job

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
    """False: weights stay gathered from the forward to the backward pass. Simulated only."""


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
    """Bytes of the fullest stage's ranks."""
    memory_by: Mapping[str, int]
    """Bytes by part."""
    estimated: tuple[str, ...] = ()
    """Kernels without a measured rate, priced by their bytes and operations."""


@dataclass(frozen=True, kw_only=True)
class LayoutPlan:
    """A layout with the choices of each layer, and its prediction."""

    planned: Planned
    layout: LayoutConfig
    engine: Annotated[EngineConfig, OneOf(ENGINES, tag="kind")]
    micro_batch_tokens: int
    layers: tuple[LayerSpan, ...]
    predicted: Predicted


def load_plan(file: str | Path) -> LayoutPlan:
    return reader.load(LayoutPlan, file)


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
    if not plan.planned.executable:
        spans = [span for span in plan.layers if span.reshard is not None]
        shown = ", ".join(f"{span.layers[0]}–{span.layers[1]}" for span in spans)
        raise LayoutError(
            f"{file} is a simulated plan: no engine chooses `reshard` for each layer (layers "
            f"{shown})",
            hint="plan again without --simulate",
        )
    rules = [
        reader.plain(span.recompute)
        for span in plan.layers
        for _ in range(span.layers[0], span.layers[1] + 1)
    ]
    return {
        "layout": reader.plain(plan.layout),
        "engine": reader.plain(plan.engine),
        "micro_batch_tokens": plan.micro_batch_tokens,
        "recompute": rules,
    }


def check_overrides(overrides: Sequence[str], file: str) -> None:
    """Raise if the command line sets what the plan sets."""
    both = [word for word in overrides if word.partition("=")[0].split(".")[0] in SECTIONS]
    if both:
        raise MisuseError(
            f"--layout {file} sets {', '.join(SECTIONS)}, and so does {', '.join(both)}",
            hint="leave the override out, or change the plan's file",
        )


def check_plan(plan: LayoutPlan, job: Job, file: str) -> None:
    """Raise unless the plan was made for this model, these ranks and these batches."""
    different = list(_differences(plan, job))
    if different:
        raise LayoutError(
            f"{file} was planned for another run",
            where="\n" + "\n".join(f"    {line}" for line in different),
            hint="run `trainer plan` again for this run",
        )


def _differences(plan: LayoutPlan, job: Job) -> Iterator[str]:
    planned = plan.planned
    own = model_hash(job.model)
    if planned.model != own:
        yield f"model: the plan has {planned.model}, the run {own}"
    if planned.gpus != job.processes:
        yield f"processes: the plan has {planned.gpus}, the run {job.processes}"
    known = {(phase.seq_len, phase.batch_tokens) for phase in planned.phases}
    for phase in job.plan.phases:
        here = phase.seq_len, phase.seq_len * phase.batch_rows
        if here not in known:
            shown = "; ".join(f"{length:,} × {size:,}" for length, size in sorted(known))
            yield (
                f"phase {phase.name}: {here[0]:,} tokens a row × {here[1]:,} a step, and the plan "
                f"has {shown}"
            )
