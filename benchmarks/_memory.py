"""Memory of a training step on CPU ranks: counted, and measured by torch's allocator."""

from __future__ import annotations

import gc
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from headrace.models.config.options.recompute import Rule
from headrace.models.model.model import initial_weights
from headrace.trainer.accounting.memory import timelines
from headrace.trainer.checkpoints.store import RunState
from headrace.trainer.engines.engine import load_weights
from headrace.trainer.layout.groups import create_groups
from headrace.trainer.layout.stages import shared_modules
from headrace.trainer.loop.hooks.hook import Hook
from headrace.trainer.loop.loaders import training_steps
from headrace.trainer.loop.loop import Loop, LoopOptions
from headrace.trainer.record.meter import TENSOR_TYPES, Meter, live_storages
from headrace.trainer.run.job import Job
from headrace.trainer.run.process import build_engine
from headrace.trainer.run.request import RunRequest
from headrace.trainer.run.resolve import resolve

from ._ranks import TIMEOUT


@contextmanager
def job_of(model: str, words: Sequence[str], steps: int = 2) -> Iterator[Job]:
    """Resolve a run of synthetic rows in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        asked: dict[str, Any] = {"model": model, "out": f"{folder}/run", "dry_run": True}
        yield resolve(
            RunRequest(overrides=["device=cpu", f"synthetic.steps={steps}", *words], **asked)
        )


def measured(model: str, words: Sequence[str]) -> list[int]:
    """Train two steps as one of the ranks, and return the most bytes of each rank. Collective."""
    [peaks] = measured_rules(model, words, [])
    return peaks


def measured_rules(model: str, words: Sequence[str], choices: Sequence[str]) -> list[list[int]]:
    """Train with each recompute choice in turn, and return the most bytes of each rank for each
    choice; with no choice, for that of the run. One engine serves all of them. Collective."""
    gc.collect()
    earlier = _storages()  # DeepSpeed keeps engines of earlier cases alive
    rules = []
    for choice in choices:
        with job_of(model, [*words, f"recompute={choice}"]) as job:
            rules.append(job.rules)
    # A first step allocates what later ones reuse; in a step ZeRO-3 learns the order of modules.
    turns = list(range(max(1, len(choices))))
    turns = sorted(2 * turns) if "engine.zero=3" in words else [0, *turns]
    with job_of(model, words, steps=len(turns)) as job:
        result, seen = _train(job, rules, turns)
    gc.collect()
    kept = sum(size for storage, size, place in earlier if storage() is not None and place in seen)
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, [peak - kept for peak in result])
    return [list(item) for item in zip(*peaks, strict=True)]


def _train(
    job: Job, rules: Sequence[tuple[Rule, ...]], turns: Sequence[int]
) -> tuple[list[int], set[int]]:
    """Train a step for each of `turns`, numbers of rules, and measure the last step of each number.
    Return the most bytes, and the addresses of the tensors that lived before the measured steps."""
    shared = shared_modules(job.run.layout, job.model, job.cuts)
    parallel = create_groups(job.run.layout, "cpu", TIMEOUT, shared)
    engine = build_engine(job, parallel)
    load_weights(engine, initial_weights(job.model, 0))
    meters: list[Meter] = []
    seen: set[int] = set()
    measured_steps = {turn: step for step, turn in enumerate(turns)}.values()

    class Measured(Hook):
        def step_begins(self, step: int) -> None:
            if meters and meters[-1].peak is None:
                meters[-1].end()
            if rules:
                engine.objective.model.set_recompute(rules[turns[step]])
            if step in measured_steps:
                meters.append(Meter(parallel.device, marks=[(step - 1, 0.0, 0.0)]))
                meters[-1].begin(step)
                seen.update(live_storages())  # the tensors that the meter has just counted

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
        hooks=[Measured()],
    )
    loop.run(start)
    meters[-1].end()
    return [meter.peak or 0 for meter in meters], seen


def _storages() -> list[tuple[weakref.ref[Any], int, int]]:
    """Return the storages of all tensors in host memory, their bytes and their addresses."""
    tensors = [candidate for candidate in gc.get_objects() if type(candidate) in TENSOR_TYPES]
    tensors = [tensor for tensor in tensors if tensor.device.type == "cpu"]
    tensors += [
        tensor.grad for tensor in tensors if tensor.is_leaf and type(tensor.grad) in TENSOR_TYPES
    ]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
    return [
        (weakref.ref(storage), storage.nbytes(), storage.data_ptr())
        for storage in storages.values()
    ]


def counted(model: str, words: Sequence[str]) -> list[dict[str, int]]:
    """Return the bytes by part at the highest level of a step, of each stage's tensor ranks."""
    with job_of(model, words) as job:
        stages = range(job.run.layout.pp)
        return [timeline.parts for stage in stages for timeline in timelines(job, stage)]
