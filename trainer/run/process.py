"""A rank's process and engine, as the run's configuration asks for them.

Everything here decides how fast a step is and which bits it computes. `trainer run` and the
benchmarks call the same functions, so that a benchmark measures the program that trains.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import timedelta

import torch

from ...models.accounting.count import build_meta
from ...models.attestation.cases.attention import ATTENTION
from ...models.kernels import choice
from ...models.layers.attention.order import Implementation, attention_order
from ...models.transforms.fp8 import quantize
from ..cluster import ranks
from ..engines.engine import Engine
from ..engines.objective import Objective
from ..layout.devices import local_device, set_allocator
from ..layout.groups import Parallel
from ..layout.stages import list_chunks
from ..loop.loop import LoopOptions
from ..loop.synthetic import SyntheticPlan
from .config import RunConfig
from .job import Job


def join_group(job: Job, timeout: timedelta, wait: timedelta | None = None) -> None:
    """Set threads, deterministic kernels, next programs and the allocator, then join the process
    group. `wait` is the time for all ranks to arrive."""
    run = job.run
    assert run.device != "auto"
    torch.set_num_threads(job.threads)
    choice.NEXT.clear()
    choice.NEXT.update(run.kernels.next_programs())
    if run.deterministic and run.device == "cuda":  # on CPU a fixed number of threads is enough
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses
        torch.use_deterministic_algorithms(True)
    backend = "gloo"
    if run.device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        set_allocator()
    ranks.initialise(backend, timeout, wait, local_device(run.device))


def build_engine(job: Job, parallel: Parallel) -> Engine:
    model = quantize(build_meta(job.model), job.precision.fp8)
    model.keep(job.cuts, list_chunks(job.run.layout, parallel.pipe.stage))
    model.shard(parallel.axes)
    model.set_recompute(job.rules)
    objective = Objective(model, job.run.z_loss, job.run.loss_divisor)
    return job.run.engine.build(objective, job.run.optimizer, job.precision, parallel)


def build_loop_options(job: Job, parallel: Parallel, stop_after: int | None = None) -> LoopOptions:
    run = job.run
    return LoopOptions(
        micro_batch_tokens=run.micro_batch_tokens,
        seed=run.seed,
        guard=run.watch,
        save_every=run.checkpoints.every,
        layers_every=run.watch.layers,
        noise_every=run.watch.noise,
        records_documents=not isinstance(job.plan, SyntheticPlan),
        times_ranks=run.watch.straggler > 0 and parallel.world > 1,
        stop_after=stop_after,
    )


def order_attention(run: RunConfig) -> AbstractContextManager[object]:
    """Return a context in which torch tries the run's implementations of attention in order."""
    return attention_order(remaining_order(run))


def remaining_order(run: RunConfig) -> tuple[Implementation, ...]:
    """Return the run's implementations of attention without those that failed their attestation."""
    failed = [name.removesuffix(ATTENTION) for name in choice.FAILED]
    return run.kernels.order(deterministic=run.deterministic, failed=failed)
