"""Evaluation: the loss on held-out rows, by source, at intervals.

    data/web/train ─ the mixture        data/web/val ─ a plan of its own, the same rows each time

Evaluation reads by a plan as training does, with one phase of one step for each source, so ranks
divide the rows in the same way. It changes neither weights nor the stream, random state or ledger.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...console.errors import PlanError
from ..pipeline.schedules import forward_only
from .batches import MicroBatch, RunPlan
from .config import EvaluateConfig

if TYPE_CHECKING:
    import torch

    from ...dataplane.order.plan import Plan
    from ..engines.engine import Engine
    from ..layout.groups import Parallel
    from .step_stats import StepStats

TRAIN = "train"


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation."""

    names: Sequence[str]
    stats: StepStats
    seconds: float


class Evaluator:
    """Evaluate an engine on the rows of a plan."""

    def __init__(
        self,
        plan: Plan,
        steps: Iterable[Sequence[MicroBatch]],
        parallel: Parallel,
        every: int,
    ) -> None:
        """Each iteration over `steps` yields this rank's micro-batches of every step."""
        self.names = [source.name for source in plan.sources]
        self.rows = range(plan.first_row, plan.last_row)
        self.steps = steps
        self.parallel = parallel
        self.every = every

    def __call__(self, engine: Engine) -> Evaluation:
        """Return the loss of the present weights. Collective."""
        import torch

        from .execute import execute
        from .step_stats import gather

        began = time.perf_counter()
        batches: list[MicroBatch] = []
        losses: list[torch.Tensor] = []
        engine.objective.eval()
        try:
            with torch.no_grad():
                for step in self.steps:
                    orders = forward_only(self.parallel.pipe.orders(len(step)))
                    losses += execute(orders, step, engine, self.parallel)
                    batches += step
        finally:
            engine.objective.train()
        divisor = engine.objective.divisor
        stats = gather(batches, losses, len(self.names), self.rows, self.parallel, divisor)
        return Evaluation(self.names, stats, time.perf_counter() - began)


def held_out(config: EvaluateConfig, plan: Plan) -> dict[str, str]:
    """Return the datasets to evaluate on, by name."""
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


def plan_of(config: EvaluateConfig, trained: RunPlan) -> Plan:
    """Return the plan of the rows to evaluate on: a phase of one step for each source."""
    from ...console import config as reader
    from ...dataplane.datasets import manifest as manifests
    from ...dataplane.order.plan import Plan
    from ...mixtures.planning.resolve_mixture import resolve
    from ...mixtures.spec.mixture import Mixture

    if not isinstance(trained, Plan):
        raise PlanError(
            "evaluate needs a mixture: synthetic rows have no held-out split",
            hint="remove evaluate, or give --mixture FILE.yaml",
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
    evaluation = resolve(reader.build(Mixture, spec, source="evaluate"))
    if evaluation.tokenizer != trained.tokenizer:
        raise PlanError(
            "the held-out datasets were built with another tokenizer than the mixture",
            hint="hold out a split of the mixture's own datasets, or build one with its tokenizer",
        )
    return evaluation
