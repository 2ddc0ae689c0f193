"""Memory of a training step on CPU ranks: counted, and measured by torch's allocator."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from headrace.models.model import initial_weights
from headrace.trainer.checkpoints.store import RunState
from headrace.trainer.costs.memory import timelines
from headrace.trainer.engines import give
from headrace.trainer.launch.worker import build_engine
from headrace.trainer.layout.groups import join
from headrace.trainer.layout.stages import shared_modules
from headrace.trainer.loop.loaders import training_steps
from headrace.trainer.loop.loop import Loop, LoopOptions
from headrace.trainer.record.meter import PLAIN, Meter, live_storages
from headrace.trainer.record.steps import NullRecorder
from headrace.trainer.run.job import Job
from headrace.trainer.run.request import Request
from headrace.trainer.run.resolve import resolve

from ._ranks import TIMEOUT

STEPS = 2
"""The second step is measured: the first allocates what later ones reuse."""


@contextmanager
def job_of(model: str, words: Sequence[str]) -> Iterator[Job]:
    """Resolve a run of synthetic rows in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        asked: dict[str, Any] = {"model": model, "out": f"{folder}/run", "dry_run": True}
        yield resolve(
            Request(overrides=["device=cpu", f"synthetic.steps={STEPS}", *words], **asked)
        )


def measured(model: str, words: Sequence[str]) -> list[int]:
    """Train two steps as one of the ranks, and return the most bytes of each rank. Collective."""
    gc.collect()
    earlier = _storages()  # DeepSpeed keeps engines of earlier cases alive
    with job_of(model, words) as job:
        shared = shared_modules(job.run.layout, job.model, job.cuts)
        parallel = join(job.run.layout, "cpu", TIMEOUT, shared)
        engine = build_engine(job, parallel)
        give(engine, initial_weights(job.model, 0))
        meter = Meter(parallel.device)
        seen: set[int] = set()

        def begin(step: int) -> None:
            meter.begin(step)
            if step == STEPS - 1:  # the tensors that the meter has just counted
                seen.update(live_storages())

        start = RunState(
            step=0, row=0, tokens=0, plan_hash=job.plan.hash, updates=0, ledger="0" * 32, seed=0
        )
        loop = Loop(
            job.plan,
            training_steps(job.plan, parallel, job.run.data),
            lambda _: 1e-4,
            engine,
            parallel,
            LoopOptions(micro_batch_tokens=job.run.micro_batch_tokens, seed=0),
            recorder=NullRecorder(),
            begin=begin,
        )
        loop.run(start)
        meter.end()
    del loop, engine, parallel
    gc.collect()
    kept = {
        place: size for storage, size, place in earlier if storage() is not None and place in seen
    }
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, (meter.peak or 0) - sum(kept.values()))
    return peaks


def _storages() -> list[tuple[weakref.ref[Any], int, int]]:
    """Return the storages of all tensors, their bytes and their addresses."""
    tensors = [thing for thing in gc.get_objects() if type(thing) in PLAIN]
    tensors += [each.grad for each in tensors if each.is_leaf and type(each.grad) in PLAIN]
    storages = {each.untyped_storage()._cdata: each.untyped_storage() for each in tensors}
    return [
        (weakref.ref(storage), storage.nbytes(), storage.data_ptr())
        for storage in storages.values()
    ]


def counted(model: str, words: Sequence[str]) -> list[dict[str, int]]:
    """Return the bytes by part at the highest level of a step, of each tensor rank."""
    with job_of(model, words) as job:
        return [each.parts for each in timelines(job, 0)]
