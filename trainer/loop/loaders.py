"""Where the rows come from: this process's part of those to train on and of those held out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from ..layout.layout import Parallel
from ..run.config import DataConfig
from ..run.run import Job
from .batches import MicroBatch, Steps, micro_rows
from .evaluate import Evaluator

if TYPE_CHECKING:
    from ...dataplane.loader.loader import Loader


def evaluator_of(job: Job, parallel: Parallel) -> Evaluator | None:
    if job.run.evaluate is None:
        return None
    from ...dataplane.order.plan import Plan as MixturePlan

    plan = MixturePlan.load(job.held_out)
    largest = max(plan.phases, key=lambda phase: phase.batch_rows)
    cp = parallel.axes.context.size
    rows = micro_rows(job.run.micro_batch_tokens, largest, parallel.dp, cp)
    loader = _loader(plan, parallel, job.run.data, plan.first_step, rows)
    return Evaluator(plan, loader, parallel, job.run.evaluate.every)


def steps_of(job: Job, parallel: Parallel) -> Steps:
    """Where the rows come from."""
    from ...dataplane.order.plan import Plan as MixturePlan
    from .synthetic import SyntheticLoader, SyntheticPlan

    plan = job.plan
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
    assert isinstance(plan, MixturePlan)
    return partial(_mixture_steps, plan, parallel, job.run.data)


def _mixture_steps(
    plan: object, parallel: Parallel, data: DataConfig, step: int, rows: int
) -> Iterator[Sequence[MicroBatch]]:
    return iter(_loader(plan, parallel, data, step, rows, workers=data.workers))


def _loader(
    plan: object, parallel: Parallel, data: DataConfig, step: int, rows: int, workers: int = 0
) -> Loader:
    from ...dataplane.datasets.cache import Cache
    from ...dataplane.loader.loader import Loader
    from ...dataplane.order.plan import Plan as MixturePlan

    assert isinstance(plan, MixturePlan)
    return Loader(
        plan,
        rank=parallel.dp_rank,
        world=parallel.dp,
        context_rank=parallel.axes.context.rank,
        context_size=parallel.axes.context.size,
        digests=parallel.tells,
        micro_batch=rows,
        start_step=step,
        workers=workers,
        cache=Cache(data.cache, max_bytes=data.cache_bytes),
        pin_memory=parallel.device.type == "cuda",
    )
