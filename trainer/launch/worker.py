"""One rank of a run: join the process group, build the engine, load the checkpoint, train.

The launcher starts it by rank.py. Under torchrun the `trainer` command itself becomes a rank.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from ...console import config as reader
from ...console import log as logs
from ...console.errors import StorageError, UserError
from ...dataplane.runlog import writer as lines
from ...models.accounting.count import build_meta
from ...models.layers.attention.order import attention_order
from ...models.transforms.fp8 import quantize
from ..accounting import exceeded
from ..accounting.stages import stage_work
from ..checkpoints import store
from ..checkpoints.saver import Saver
from ..cluster import ranks, slurm
from ..cluster.agreement import agreed, by_first, from_first
from ..cluster.lost_ranks import gather_ports
from ..cluster.rendezvous import check_late_errors
from ..engines.engine import Engine
from ..engines.objective import Objective
from ..folders.folder import RunFolder
from ..layout.devices import local_device, set_allocator
from ..layout.groups import Parallel, join
from ..layout.stages import chunks_of, shared_modules
from ..loop.loaders import evaluator, training_steps
from ..loop.loop import Loop, LoopOptions
from ..loop.profiler import MemorySnapshot, Profiler, Trace
from ..record import speed
from ..record.logger import LoggedRun
from ..record.loggers import open_loggers
from ..record.meter import Meter, gathered
from ..record.noise_scale import NoiseScale
from ..record.steps import NullRecorder, RunRecorder
from ..record.stragglers import Stragglers
from ..run.job import Job
from ..run.plan_check import prediction
from ..scores.at_checkpoints import CheckpointScores
from . import records, restore
from .facts import facts_of
from .kernel_trial import settle_kernels
from .options import StartOptions

MINIMUM_TIMEOUT = timedelta(minutes=30)

log = logs.get_logger(__name__)


def work(job: Job, watched: ranks.Watched, asked: ranks.StopAsked, options: StartOptions) -> int:
    """Train until the plan's end, or until asked to stop. Return the exit code."""
    joined = time.monotonic()
    run, folder = job.run, job.folder
    watched.beat("joining the process group")
    parallel = _join(job, options)
    if _is_finished(job, parallel):
        dist.destroy_process_group()
        return 0
    explained = partial(
        exceeded.explained, job, parallel.rank, lambda: watched.last[0], parallel.device
    )
    with explained():
        watched.beat("trying the kernels")
        for name, problem in settle_kernels(job, parallel).items():
            if parallel.first:
                log.warning("the kernel %s failed, plain torch takes its place: %s", name, problem)
        watched.beat("building the model")
        engine = build_engine(job, parallel)
        if watched.folder is None:  # no launcher says which rank was lost
            watched.ports_by_rank.extend(gather_ports(parallel.control))
        watched.beat("loading weights")
        earlier = restore.checkpoints(job, parallel)
        state, came_from = restore.begin(job, engine, parallel, earlier, fallback=options.fallback)

    def record() -> RunRecorder:
        check_late_errors()
        records.take_up(
            folder,
            job.plan,
            state,
            new_ledger=options.new_ledger,
            keep_tails=run.checkpoints.keep_abandoned,
        )
        return _recorder(job, parallel.world, options.began, state.step)

    recorder = by_first(record, parallel.control) or NullRecorder()

    def report(step: int, blocked: float, error: Exception | None) -> None:
        recorder.saved(step, blocked, error)
        if parallel.first and error is None:
            slurm.note("saved", step)

    texts = {store.MODEL: reader.dump(job.model)}
    saver = Saver(
        folder.checkpoints,
        run.checkpoints,
        parallel.checkpoint,
        job.ends,
        texts,
        report=report,
    )
    recorder.event(
        "resume" if earlier else "start",
        state.step,
        layout=job.layout,
        checkpoint=came_from,
        seconds=round(time.monotonic() - joined, 2),
    )
    if run.watch.may_roll_back and not earlier:  # a rollback needs a checkpoint
        saver.save(engine.fragments(), state)
        saver.wait()
    traces: list[Trace] = []
    if options.profiled_steps is not None:
        traces.append(Profiler(folder.profiles, options.profiled_steps, parallel.rank))
    if options.memory_snapshot is not None:
        traces.append(MemorySnapshot(folder.profiles, options.memory_snapshot, parallel.rank))

    meter = None
    if prediction(job) is not None:
        meter = Meter(parallel.device, profiled=options.profile is None)

    def begin(step: int) -> None:
        watched.beat(f"step {step}")
        if meter is not None:
            meter.begin(step)
        for trace in traces:
            trace.begin(step)

    def score(step: int) -> None:
        if scores is not None and scores.due(step):
            saver.wait()
            scores(step)

    scores = scores_of(job, parallel, watched)
    if scores is not None and earlier:
        scores.take_up(state.step)
    loop = Loop(
        job.plan,
        training_steps(job.plan, parallel, run.data),
        lr_of(job),
        engine,
        parallel,
        LoopOptions(
            micro_batch_tokens=run.micro_batch_tokens,
            seed=run.seed,
            guard=run.watch,
            save_every=run.checkpoints.every,
            layers_every=run.watch.layers,
            noise_every=run.watch.noise,
            times_ranks=run.watch.straggler > 0 and parallel.world > 1,
            stop_after=options.stop_after,
        ),
        recorder=recorder,
        saver=saver,
        evaluator=None
        if run.evaluate is None
        else evaluator(job.held_out, run.evaluate, parallel, run.data, run.micro_batch_tokens),
        restore=lambda: restore.go_back(job, engine, parallel),
        stop_asked=asked,
        begin=begin,
        memory=partial(speed.memory_used, run.device),
        saved=score,
    )
    try:
        with explained(), attention_order(run.kernels.order(deterministic=run.deterministic)):
            state, finished = loop.run(state)
        if meter is not None:
            meter.end()
            recorder.event("measured", state.step, **gathered(meter, job.plan, parallel.control))
        recorder.event("finish" if finished else "stop", state.step, ledger=state.ledger)
        if parallel.first and finished:
            slurm.note("finished", state.step)
        elif parallel.first and state.step == options.stop_after:
            slurm.note("stopped", state.step)  # a person asked for it: no requeue
    except UserError as error:
        with contextlib.suppress(StorageError):  # a full disk may have caused the failure
            recorder.event("fail", _step_reached(folder), error=str(error))
            if parallel.first:
                slurm.note("failed", _step_reached(folder))
        raise
    finally:
        for trace in traces:
            trace.close()
        recorder.close()
    dist.barrier(parallel.control)
    dist.destroy_process_group()
    return 0 if finished else ranks.INTERRUPTED


def _is_finished(job: Job, parallel: Parallel) -> bool:
    """Return True if the run has nothing left to do. Rank 0 decides. Collective."""
    control = parallel.control
    return bool(from_first(by_first(lambda: records.finished(job), control), control))


def _join(job: Job, options: StartOptions) -> Parallel:
    """Join the process group as one rank of the run, which all ranks start alike."""
    run = job.run
    assert run.device != "auto"
    torch.set_num_threads(job.threads)
    if run.deterministic and run.device == "cuda":  # on CPU a fixed number of threads is enough
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses
        torch.use_deterministic_algorithms(True)
    # The launcher times out first: it can report the stack of each rank.
    timeout = max(MINIMUM_TIMEOUT, timedelta(seconds=run.watch.stall_seconds + 60))
    backend = "gloo"
    if run.device == "cuda":
        backend = "cpu:gloo,cuda:nccl"
        set_allocator()
    wait = timedelta(seconds=run.watch.join_seconds)
    ranks.initialise(backend, timeout, wait, local_device(run.device))
    # Before the groups of the layout: ranks with other layouts would wait for each other.
    agreed("the run", lambda: facts_of(job, options), dict)
    shared = shared_modules(run.layout, job.model, job.cuts)
    return join(run.layout, run.device, timeout, shared)


def build_engine(job: Job, parallel: Parallel) -> Engine:
    model = quantize(build_meta(job.model), job.precision.fp8)
    model.keep(job.cuts, chunks_of(job.run.layout, parallel.pipe.stage))
    model.shard(parallel.axes)
    model.set_recompute(job.rules)
    objective = Objective(model, job.run.z_loss, job.run.loss_divisor)
    return job.run.engine.build(objective, job.run.optimizer, job.precision, parallel)


def scores_of(job: Job, parallel: Parallel, watched: ranks.Watched) -> CheckpointScores | None:
    if job.run.scores is None:
        return None
    return CheckpointScores(
        job.run.scores,
        job.folder,
        job.plan.last_step,
        job.run.device,
        parallel.control,
        watched.beat,
    )


def lr_of(job: Job) -> Callable[[int], float]:
    from ..loop.synthetic import SyntheticPlan

    plan, top = job.plan, job.run.optimizer.lr
    if isinstance(plan, SyntheticPlan):
        return lambda step: top * plan.lr_factor(step)
    from ...dataplane.order.plan import Plan
    from ...mixtures.learning_rate import lr_factor

    assert isinstance(plan, Plan)
    return lambda step: top * lr_factor(plan, step)


def _recorder(job: Job, ranks: int, asked: float, first_step: int) -> RunRecorder:
    watch, device = job.run.watch, job.run.device
    peak = watch.peak_flops or speed.known_peak(device)
    counts = speed.speed_of(
        job.model,
        {phase.seq_len for phase in job.plan.phases},
        rules=job.rules,
        peak=peak * ranks if peak else None,
        fp8=job.precision.fp8,
    )
    run = LoggedRun(
        folder=job.folder, plan=job.plan, watch=watch, first_step=first_step, stream=sys.stderr
    )
    stages = job.run.layout.pp
    return RunRecorder(
        job.plan,
        open_loggers(run),
        counts,
        stragglers=Stragglers(
            watch.straggler, watch.straggler_steps, stages, partial(stage_work, job)
        ),
        noise=NoiseScale.after(job.folder.signals),
        asked=asked,
    )


def _step_reached(folder: RunFolder) -> int:
    last = lines.last(folder.ledger)
    return int(last["step"]) if last else 0
