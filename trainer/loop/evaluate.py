"""Evaluation: the loss on rows that are held out, by source, at intervals.

    data/web/train ─ the mixture        data/web/val ─ a plan of its own, the same rows each time

It reads by a plan as training does, one phase and one step for each source, so that ranks share
the rows in the same way. Weights, the stream, what is random, and the ledger do not notice it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from ...console.errors import PlanError
from ..engines.engine import Engine
from ..engines.objective import compute
from ..layout.layout import Parallel
from .batches import MicroBatch
from .batches import Plan as AnyPlan
from .step_stats import Facts, exchange

if TYPE_CHECKING:
    from ...dataplane.order.plan import Plan

TRAIN = "train"


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """The loss on rows that no step trains on."""

    every: int = 500
    """Steps between two evaluations. The ends of phases are evaluated as well."""
    rows: int = 64
    """Of each source, at most."""
    seq_len: int | None = None
    """Tokens of a row; those of the plan's shortest, if left out."""
    split: str = "val"
    """What `tokenize build --split` has called the part that it held out."""
    sources: Mapping[str, str] = field(default_factory=dict)
    """Datasets by name. Left out: the split beside each of the mixture's `…/train`."""

    def __post_init__(self) -> None:
        for name in ("every", "rows", "seq_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")


@dataclass(frozen=True)
class Evaluation:
    """What one evaluation found."""

    names: Sequence[str]
    facts: Facts
    seconds: float


class Evaluator:
    """Evaluates an engine on the rows of a plan."""

    def __init__(
        self,
        plan: Plan,
        steps: Iterable[Sequence[MicroBatch]],
        parallel: Parallel,
        every: int,
    ) -> None:
        """`steps` gives, each time it is iterated, this rank's micro-batches of every step."""
        self.names = [source.name for source in plan.sources]
        self.steps = steps
        self.parallel = parallel
        self.every = every

    def __call__(self, engine: Engine) -> Evaluation:
        """The loss of the weights as they are. Collective."""
        began = time.perf_counter()
        batches, losses = [], []
        where = (self.parallel.device, self.parallel.axes.context)
        engine.objective.eval()
        try:
            with torch.no_grad():
                for step in self.steps:
                    for batch in step:
                        losses.append(compute(engine, batch, *where).rows)
                        batches.append(batch)
        finally:
            engine.objective.train()
        facts = exchange(batches, losses, len(self.names), self.parallel)
        return Evaluation(self.names, facts, time.perf_counter() - began)


def held_out(config: EvaluateConfig, plan: Plan) -> dict[str, str]:
    """The datasets to evaluate on, by name."""
    if config.sources:
        return dict(config.sources)
    beside = {
        source.name: f"{source.url.rstrip('/').removesuffix(TRAIN)}{config.split}"
        for source in plan.sources
        if source.url.rstrip("/").endswith(f"/{TRAIN}")
    }
    if not beside:
        raise PlanError(
            f"evaluate is set, and no source of the mixture has a `{config.split}` beside it",
            hint=f"build the datasets with `tokenize build --split {config.split}=0.01` and name "
            f"their `…/{TRAIN}` in the mixture, or name datasets: evaluate.sources.NAME=URL",
        )
    return beside


def digest_of(config: EvaluateConfig) -> str:
    """Digest of the settings that choose the held-out rows. It names the file that keeps their
    plan, so that every start evaluates the same rows unless these settings change."""
    asked = [config.rows, config.seq_len, config.split, sorted(config.sources.items())]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:8]


def plan_of(config: EvaluateConfig, trained: AnyPlan) -> Plan:
    """The rows to evaluate on: for each source a phase of one step."""
    from ...console import config as reader
    from ...dataplane.datasets import manifest as manifests
    from ...dataplane.order.plan import Plan as MixturePlan
    from ...mixtures.planning.resolve import resolve
    from ...mixtures.spec.mixture import Mixture

    if not isinstance(trained, MixturePlan):
        raise PlanError(
            "evaluate needs a mixture: random rows have nothing to hold out",
            hint="leave out evaluate, or give --mixture FILE.yaml",
        )
    length = config.seq_len or min(phase.seq_len for phase in trained.phases)
    sources = held_out(config, trained)
    phases = {}
    for name, url in sources.items():
        rows = min(config.rows, (manifests.load(url).tokens - 1) // length)
        if rows < 1:
            raise PlanError(
                f"{url} has too few tokens to evaluate on a row of {length:,}",
                hint="hold out more, or set a shorter evaluate.seq_len",
            )
        tokens = rows * length
        phases[f"evaluate {name}"] = {
            "tokens": tokens,
            "seq_len": length,
            "batch": tokens,
            "weights": {name: 1},
        }
    spec = {
        "isolate_documents": trained.isolate_documents,
        "sources": {name: {"data": url} for name, url in sources.items()},
        "phases": phases,
    }
    found = resolve(reader.build(Mixture, spec, source="evaluate"))
    if found.tokenizer != trained.tokenizer:
        raise PlanError(
            "what is to be evaluated on was made with another tokenizer than the mixture",
            hint="hold out a split of the mixture's own datasets, or build one with its tokenizer",
        )
    return found
