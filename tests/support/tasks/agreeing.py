"""Tasks for ranks that must agree (see ranks.py): with a fault on rank 1, and without."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.configs import CONFIGS
from support.tasks.timed_ranks import Clock, Shared, Timed

from headrace.console.errors import RunError, UserError
from headrace.dataplane.runlog import writer as lines
from headrace.models.accounting.count import build_meta
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.conversion.folders import write_model
from headrace.models.model.model import initial_weights
from headrace.trainer.checkpoints import store
from headrace.trainer.checkpoints.policy import CheckpointConfig
from headrace.trainer.checkpoints.saver import Saver
from headrace.trainer.checkpoints.store import RunState
from headrace.trainer.cluster.agreement import read_agreed, run_on_first
from headrace.trainer.cluster.hangs import is_waiting
from headrace.trainer.engines.engine import Engine, load_weights
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.objective import Objective
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.launch import facts, restore, worker
from headrace.trainer.launch.options import StartOptions
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.groups import Parallel, create_groups
from headrace.trainer.loop.compute_time import HostClock
from headrace.trainer.loop.hooks.hook import Hook
from headrace.trainer.loop.loop import Loop, LoopOptions
from headrace.trainer.loop.synthetic import SyntheticConfig, SyntheticLoader, SyntheticPlan
from headrace.trainer.placement import team
from headrace.trainer.record.config import WatchConfig
from headrace.trainer.record.logger import LoggedRun
from headrace.trainer.record.loggers import open_loggers
from headrace.trainer.record.speed import Speed
from headrace.trainer.record.steps import NullRecorder, RunRecorder
from headrace.trainer.record.stragglers import Stragglers
from headrace.trainer.run.job import Job
from headrace.trainer.run.request import RunRequest
from headrace.trainer.run.resolve import load, resolve

TINY = CONFIGS / "tiny.yaml"
SYNTHETIC = ["synthetic.steps=6", "synthetic.batch_rows=4", "synthetic.seq_len=16"]


@cache
def place(tp: int = 1, cp: int = 1) -> Parallel:
    return create_groups(LayoutConfig(tp=tp, cp=cp), "cpu", timedelta(minutes=5))


def make_engine(seed: int = 3) -> Engine:
    shape = load_model_config(TINY)
    objective = Objective(build_meta(shape))
    engine = Fsdp2Config().build(objective, AdamWConfig(lr=1e-2), PRECISIONS["fp32"], place())
    load_weights(engine, initial_weights(shape, seed))
    return engine


def answer(error: UserError) -> str:
    """Return an error in one line, without its hint."""
    lines = [line.strip() for line in (error.where or "").splitlines() if line]
    return "; ".join([error.message, *lines])


def compare(facts_of: list[Any]) -> str:
    """Agree on the facts of each rank; a text is the error of a rank that has none."""

    def read() -> Any:
        mine = facts_of[dist.get_rank()]
        if isinstance(mine, str):
            raise UserError(mine)
        return mine

    try:
        read_agreed("a test", read, dict)
    except UserError as error:
        return answer(error)
    return "agreed"


def late_for_barrier() -> bool:
    """Come to a barrier late on rank 1; return whether a thread of each rank sees it wait."""
    seen: list[bool] = []
    watch = threading.Timer(0.3, lambda: seen.append(is_waiting()))
    watch.start()
    time.sleep(0.6 * dist.get_rank())
    dist.barrier()
    watch.join()
    return seen[0]


def refuse_first(error: Exception | None) -> str:
    """Run a task on rank 0 alone, which raises `error`; return what each rank gets."""
    ran = []

    def run_first() -> str:
        ran.append(dist.get_rank())
        if error is not None:
            raise error
        return "done"

    try:
        result = run_on_first(run_first)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    assert (result, ran) == (("done", [0]) if dist.get_rank() == 0 else (None, []))
    return "done"


def make_job(folder: Path, words: list[str], mixture: str | None = None) -> Job:
    words = [*words, "model.vocab_size=512"] if mixture else [*SYNTHETIC, *words]
    return resolve(RunRequest(model=str(TINY), out=str(folder), overrides=words, mixture=mixture))


def start(
    folder: Path,
    words: list[list[str]],
    mixtures: Sequence[str | None] = (None, None),
    changed: dict[str, Any] | None = None,
) -> str:
    """Join the process group of a run; overrides and mixtures by rank. `changed` are facts about
    the machine of rank 1."""
    rank = dist.get_rank()
    here = dict(changed or {}) if rank else {}
    job = make_job(folder / "run", words[rank], mixtures[rank])
    options = StartOptions(stop_after=here.pop("stop_after", None))
    with ExitStack() as stack:
        patch = stack.enter_context
        patch(mock.patch.object(worker.ranks, "initialise"))  # the pool has joined
        if "torch" in here:
            patch(mock.patch.object(torch, "__version__", here.pop("torch")))
        if "headrace" in here:
            patch(mock.patch.object(facts, "__version__", here.pop("headrace")))
        if "sources" in here:
            patch(mock.patch.object(facts.sources, "digest", return_value=here.pop("sources")))
        if "kernels" in here:
            patch(mock.patch.object(facts, "find_device_problem", return_value=here.pop("kernels")))
        patch(mock.patch.dict("os.environ", here))
        try:
            worker._join(job, options)
        except RunError as error:
            return answer(error)
        finally:
            torch.set_num_threads(1)
    return "agreed"


def save(folder: Path, steps: list[int], seed: int = 3) -> None:
    """Save a run's checkpoints at some steps."""
    job = make_job(folder, [])
    dist.barrier()
    if place().first:
        folder.mkdir()
        job.save()
    keeper = Saver(folder / "checkpoints", CheckpointConfig(), place().checkpoint)
    for step in steps:
        state = RunState(
            step=step,
            row=4 * step,
            tokens=64 * step,
            plan_hash=job.plan.hash,
            updates=step,
            ledger="",
            seed=1,
        )
        keeper.save(make_engine(seed).fragments(), state)
        keeper.wait()


def resume(
    folder: Path,
    hidden: list[int] | None = None,
    other_root: Path | None = None,
    fallback: bool = False,
) -> list[int] | str:
    """Load the newest checkpoint, then roll back to it; return its step. Rank 1 does not list the
    `hidden` steps, or has the folder `other_root` in place of the run's."""
    rank = dist.get_rank()
    listed = store.committed

    def stale(checkpoints: Path) -> list[Path]:
        return [
            path for path in listed(checkpoints) if store.parse_step(path) not in (hidden or [])
        ]

    job = load(RunFolder(other_root if rank and other_root else folder))
    engine = make_engine()
    with mock.patch.object(store, "committed", stale if rank else listed):
        try:
            saved = restore.list_checkpoints(job, place())
            state, _ = restore.load_initial_state(job, engine, place(), saved, fallback=fallback)
            return [state.step, restore.roll_back(job, engine, place()).step]
        except UserError as error:
            return answer(error)


def export_model(folder: Path) -> None:
    """Write a model's folder, from which a run can start."""
    if place().first:
        shape = load_model_config(TINY)
        write_model(shape, dict(initial_weights(shape, 3)), folder, format="headrace")
    dist.barrier()


def initialize(folder: Path, places: list[Path]) -> str:
    """Start from the weights in a folder, which has another place on each rank."""
    job = make_job(folder, [f"init_from.path={places[dist.get_rank()]}"])
    try:
        restore.load_initial_state(job, make_engine(), place(), [], fallback=False)
    except UserError as error:
        return answer(error)
    return "loaded"


def reader_of(plan: SyntheticPlan, rank: int, world: int) -> Callable[[int, int], Iterator[Any]]:
    """Return the function with which the loop opens the rows of a rank, from a step on."""
    return lambda step, rows: iter(
        SyntheticLoader(plan, rank=rank, world=world, micro_batch=rows, start_step=step)
    )


def take_rows(as_rank: list[int]) -> str:
    """Train two steps; each rank reads the rows of the data-parallel rank `as_rank` names."""
    plan = SyntheticPlan(SyntheticConfig(steps=2, seq_len=16, batch_rows=4), 37, 1)
    rank, world = as_rank[dist.get_rank()], dist.get_world_size()
    loop = Loop(
        plan,
        reader_of(plan, rank, world),
        plan.lr_factor,
        make_engine(),
        place(),
        LoopOptions(micro_batch_tokens=32, seed=1),
    )
    state = RunState(step=0, row=0, tokens=0, plan_hash=plan.hash, updates=0, ledger="", seed=1)
    try:
        return "finished" if loop.run(state)[1] else "stopped"
    except RunError as error:
        return answer(error)


@dataclass
class Nap(Hook):
    """Naps before the first steps."""

    shared: Shared

    def step_begins(self, step: int) -> None:
        if step < 5:
            self.shared.nap()


def slowed(folder: Path, slow: int | None) -> dict[str, list[dict[str, Any]]]:
    """Train steps before which the rank `slow` naps; return rank 0's metrics and events."""
    plan = SyntheticPlan(SyntheticConfig(steps=8, seq_len=16, batch_rows=4), 37, 1)
    rank, world, run = dist.get_rank(), dist.get_world_size(), RunFolder(folder)
    recorder: Any = NullRecorder()
    if rank == 0:
        watch = WatchConfig(tensorboard=False)
        logged = LoggedRun(folder=run, plan=plan, watch=watch, first_step=0, stream=StringIO())
        speed = Speed({16: 1.0}, {16: 1.0}, peak=None)
        stragglers = Stragglers(bound=1e-4, steps=3)
        recorder = RunRecorder(plan, open_loggers(logged), speed, stragglers=stragglers)
    shared = Shared(folder)
    loop = Loop(
        plan,
        reader_of(plan, rank, world),
        plan.lr_factor,
        make_engine(),
        place(),
        LoopOptions(micro_batch_tokens=32, seed=1, times_ranks=True),
        hooks=[recorder, *([Nap(shared)] if rank == slow else [])],
    )
    assert loop.compute_timer is not None and isinstance(loop.compute_timer.clock, HostClock)
    loop.compute_timer = Timed(Clock(shared))
    loop.run(RunState(step=0, row=0, tokens=0, plan_hash=plan.hash, updates=0, ledger="", seed=1))
    recorder.close()
    files = {"metrics": run.metrics, "events": run.events}
    return {name: list(lines.read(file)) for name, file in files.items()} if rank == 0 else {}


GENOME = SyntheticPlan(SyntheticConfig(steps=1, seq_len=16, batch_rows=4), 37, 1)
"""A step whose targets are bases, masked bases and control tags, by their ids."""


def weights_of(targets: torch.Tensor) -> torch.Tensor:
    return torch.tensor([1.0, 0.1, 0.0])[targets % 3]


@dataclass
class Kept(Hook):
    numbers: list[list[float]] = field(default_factory=list)

    def step_done(self, record: Any) -> None:
        stats = record.stats
        z_loss = stats.metrics.get("z_loss", 0.0)
        self.numbers.append([stats.loss, record.update.grad_norm, z_loss])


def divided_loss(tp: int, cp: int, divisor: Any, z_loss: float) -> list[float]:
    """Return the loss, the gradient norm and the z-loss of the step, in micro-batches of one
    row."""
    parallel, shape, kept = place(tp, cp), load_model_config(TINY), Kept()
    model = build_meta(shape)
    model.shard(parallel.axes)
    engine = Fsdp2Config().build(
        Objective(model, z_loss, divisor), AdamWConfig(), PRECISIONS["fp32"], parallel
    )
    load_weights(engine, initial_weights(shape, 3))
    axis = parallel.axes.context

    def steps(step: int, rows: int) -> Iterator[Sequence[Any]]:
        loader = SyntheticLoader(
            GENOME,
            rank=parallel.dp_rank,
            world=parallel.dp,
            micro_batch=rows,
            start_step=step,
            context_rank=axis.rank,
            context_size=axis.size,
        )
        for batches in loader:
            yield [replace(batch, weights=weights_of(batch.targets)) for batch in batches]

    options = LoopOptions(micro_batch_tokens=16 // cp, seed=1)
    loop = Loop(GENOME, steps, GENOME.lr_factor, engine, parallel, options, hooks=[kept])
    loop.run(RunState(step=0, row=0, tokens=0, plan_hash=GENOME.hash, updates=0, ledger="", seed=1))
    return kept.numbers[0]


def teamwork(folder: Path, batches: Sequence[Sequence[int]], workers: int) -> dict[str, Any]:
    """Map batches, fail on rank 1, map again; return rank 0's results and this rank's batches."""
    computed: list[Sequence[int]] = []

    def square(batch: Sequence[int]) -> list[int]:
        computed.append(batch)
        return [number * number for number in batch]

    def fail(batch: Sequence[int]) -> list[int]:
        if dist.get_rank():
            raise KeyError("of rank 1")
        return list(batch)

    squares = team.Team({"square": square, "fail": fail}, workers=workers)

    def run_first() -> tuple[list[list[int]], str, list[list[int]]]:
        result, failure = squares.map_batches("square", batches, "", ""), ""
        try:
            squares.map_batches("fail", [[1], [2]], "", "")
        except RunError as error:
            failure = error.message
        return result, failure, squares.map_batches("square", [[9]], "", "")

    with mock.patch.object(team, "ROUND", 3):
        return {"found": squares.lead(run_first), "computed": computed}
