"""Load this rank's training rows and held-out rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..layout.groups import Parallel
from .batches import MicroBatch, RunPlan, Steps, micro_rows
from .config import DataConfig, EvaluateConfig
from .evaluate import Evaluator

if TYPE_CHECKING:
    from ...dataplane.loader.loader import Loader
    from ...dataplane.order.plan import Plan
    from ...dataplane.order.stream import Stream
    from .mixing.decided_plan import DecidedPlan


def training_steps(
    plan: RunPlan, parallel: Parallel, data: DataConfig, decided: DecidedPlan | None = None
) -> Steps:
    """Return a function that reads this rank's micro-batches, starting at any step. `decided` has
    the plan of a mixture with the run's decisions."""
    from ...dataplane.order.plan import Plan
    from .mixing.decided_plan import DecidedPlan
    from .synthetic import SyntheticLoader, SyntheticPlan

    if isinstance(plan, SyntheticPlan):
        return lambda step, rows: iter(
            SyntheticLoader(
                plan,
                rank=parallel.dp_rank,
                world=parallel.dp,
                context_rank=parallel.axes.context.rank,
                context_size=parallel.axes.context.size,
                micro_batch=rows,
                start_step=step,
            )
        )
    assert isinstance(plan, Plan)
    return partial(_mixture_steps, decided or DecidedPlan(plan), parallel, data)


def load_evaluator(
    held_out: Path,
    config: EvaluateConfig,
    parallel: Parallel,
    data: DataConfig,
    micro_batch_tokens: int,
) -> Evaluator:
    """Build the evaluator for the plan at `held_out`."""
    from ...dataplane.order.plan import Plan

    plan = Plan.load(held_out)
    largest = max(plan.phases, key=lambda phase: phase.batch_rows)
    rows = micro_rows(micro_batch_tokens, largest, parallel.dp, parallel.axes.context.size)
    loader = _loader(plan, parallel, data, plan.first_step, rows)
    return Evaluator(plan, loader, parallel, config.every)


def _mixture_steps(
    decided: DecidedPlan, parallel: Parallel, data: DataConfig, step: int, rows: int
) -> Iterator[Sequence[MicroBatch]]:
    """Yield micro-batches. Where a decision begins, rows that were read ahead are discarded."""
    while step < decided.plan.end_step:
        stream = decided.stream
        num_decisions = len(stream.plan.decisions)
        loader = _loader(stream.plan, parallel, data, step, rows, data.workers, stream)
        batches = iter(loader)
        try:
            while step < loader.steps.stop and not decided.has_changed(num_decisions, step):
                yield next(batches)
                step += 1
        finally:
            batches.close()


def _loader(
    plan: Plan,
    parallel: Parallel,
    data: DataConfig,
    step: int,
    rows: int,
    workers: int = 0,
    stream: Stream | None = None,
) -> Loader:
    from ...dataplane.datasets.cache import Cache
    from ...dataplane.loader.loader import Loader

    return Loader(
        plan,
        rank=parallel.dp_rank,
        world=parallel.dp,
        context_rank=parallel.axes.context.rank,
        context_size=parallel.axes.context.size,
        digests=parallel.reports_rows,
        micro_batch=rows,
        start_step=step,
        workers=workers,
        cache=Cache(data.cache, max_bytes=data.cache_bytes),
        pin_memory=parallel.device.type == "cuda",
        stream=stream,
    )
