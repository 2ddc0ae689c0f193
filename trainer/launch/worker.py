"""A rank: join the process group, build the engine, load the checkpoint, train.

The launcher starts ranks through rank.py. Under torchrun, the `trainer` command itself becomes a
rank.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch.distributed as dist

from ...console import log as logs
from ...console.errors import StorageError, UserError
from ...dataplane.runlog import writer as lines
from ..accounting import exceeded
from ..accounting.stages import stage_flops
from ..checkpoints.store import RunState
from ..cluster import ranks
from ..cluster.agreement import broadcast_first, read_agreed, run_on_first
from ..cluster.lost_ranks import gather_ports
from ..cluster.rendezvous import check_late_errors
from ..engines.engine import Engine
from ..folders.folder import ATTESTED, RunFolder
from ..layout.groups import Parallel, create_groups
from ..layout.stages import shared_modules
from ..loop.hooks.heartbeat import Heartbeat
from ..loop.hooks.hook import Hook, Hooks
from ..loop.hooks.profiler import MemorySnapshot, Profiler
from ..loop.hooks.scores import ScoreCheckpoints
from ..loop.hooks.slurm_notes import SlurmNotes
from ..loop.hooks.steering import Steering
from ..loop.hooks.stop_signal import StopSignal
from ..loop.loaders import load_evaluator, training_steps
from ..loop.loop import Loop
from ..record import speed
from ..record.logger import LoggedRun
from ..record.loggers import open_loggers
from ..record.meter import Meter, MeterSteps, PeakMemory
from ..record.noise_scale import NoiseScale
from ..record.steps import NullRecorder, RunRecorder
from ..record.stragglers import Stragglers
from ..run.job import Job
from ..run.plan_check import followed_plan
from ..run.process import build_engine, build_loop_options, join_group, order_attention
from ..scores.at_checkpoints import CheckpointScores
from . import records, restore
from .attestation import AttestationOutcome, attesting
from .facts import collect_facts
from .kernels.compilation import compiling
from .options import StartOptions

MINIMUM_TIMEOUT = timedelta(minutes=30)

log = logs.get_logger(__name__)


def work(job: Job, watched: ranks.Watched, asked: ranks.StopRequest, options: StartOptions) -> int:
    """Train until the plan's end, or until asked to stop. Return the exit code."""
    began = time.monotonic()
    watched.beat("joining the process group")
    parallel = _join(job, options)
    if _is_finished(job, parallel):
        dist.destroy_process_group()
        return 0
    explain_out_of_memory = partial(
        exceeded.explain_out_of_memory,
        job,
        parallel.rank,
        lambda: watched.last_beat[0],
        parallel.device,
    )
    with explain_out_of_memory():
        loaded = _load_engine(job, parallel, watched, options)
    engine, state, resumed = loaded.engine, loaded.state, loaded.resumed
    recorder = _open_recorder(job, parallel, options, state)
    steering = _open_steering(job, parallel, recorder, state)
    hooks = Hooks()
    checkpoints = restore.RunCheckpoints(job, engine, parallel, hooks.sealed)
    hooks.hooks += _make_hooks(job, parallel, watched, asked, options, recorder, checkpoints)
    if steering is not None:
        hooks.hooks.append(steering)
    recorder.event(
        "resume" if resumed else "start",
        state.step,
        layout=job.layout,
        checkpoint=loaded.weights_source,
        seconds=round(time.monotonic() - began, 2),
    )
    if loaded.attested is not None:
        recorder.event(ATTESTED, state.step, **loaded.attested.details())
    if job.run.watch.may_roll_back and not resumed:  # a rollback needs a checkpoint
        checkpoints.save(engine.fragments(), state)
        checkpoints.wait()
    hooks.run_begins(state, resumed=resumed)
    loop = _make_loop(job, engine, parallel, options, hooks, checkpoints, steering)
    try:
        with explain_out_of_memory(), order_attention(job.run):
            state, finished = loop.run(state)
        hooks.ended(state, finished=finished)
    except UserError as error:
        with contextlib.suppress(StorageError):  # a full disk may have caused the failure
            hooks.failed(_step_reached(job.folder), error)
        raise
    finally:
        hooks.close()
    dist.barrier(parallel.control)
    dist.destroy_process_group()
    return 0 if finished else ranks.INTERRUPTED


@dataclass(frozen=True)
class LoadedEngine:
    """An engine with loaded weights."""

    engine: Engine
    state: RunState
    weights_source: str | None
    """Checkpoint, run or folder; None: a fresh initialisation."""
    resumed: bool
    """True if the run had a checkpoint."""
    attested: AttestationOutcome | None
    """Attestation of the fused kernels; None where none runs."""


def _load_engine(
    job: Job, parallel: Parallel, watched: ranks.Watched, options: StartOptions
) -> LoadedEngine:
    """Build the engine and load weights. Collective."""
    beat = watched.beat
    beat("listing the kernels of the model")
    with (
        compiling(job, parallel, beat) as compilation,
        attesting(job, parallel, beat, compilation.wait) as settle,
    ):
        watched.beat("building the model")
        engine = build_engine(job, parallel)
        if watched.folder is None:  # no launcher says which rank was lost
            watched.ports_by_rank.extend(gather_ports(parallel.control))
        watched.beat("loading weights")
        saved = restore.list_checkpoints(job, parallel)
        state, weights_source = restore.load_initial_state(
            job, engine, parallel, saved, fallback=options.fallback
        )
        compilation.settle()
        attested = settle()
    if attested is not None and parallel.first:
        attested.record(job)
    return LoadedEngine(engine, state, weights_source, bool(saved), attested)


def _make_hooks(
    job: Job,
    parallel: Parallel,
    watched: ranks.Watched,
    asked: ranks.StopRequest,
    options: StartOptions,
    recorder: RunRecorder | NullRecorder,
    checkpoints: restore.RunCheckpoints,
) -> list[Hook]:
    """Return this rank's hooks, in the order in which they run."""
    run, profiles = job.run, job.folder.profiles
    hooks: list[Hook] = [Heartbeat(watched), StopSignal(asked), PeakMemory(run.device)]
    if followed_plan(job) is not None:
        meter = Meter(parallel.device, profiled=options.profile is None)
        hooks.append(MeterSteps(meter, job.plan, parallel.control, recorder))
    if options.profiled_steps is not None:
        hooks.append(Profiler(profiles, options.profiled_steps, parallel.rank))
    if options.memory_snapshot is not None:
        hooks.append(MemorySnapshot(profiles, options.memory_snapshot, parallel.rank))
    hooks.append(recorder)
    if parallel.first:
        hooks.append(SlurmNotes(options.stop_after))
    if run.scores is not None:
        scores = CheckpointScores(
            run.scores,
            job.folder,
            job.plan.end_step,
            run.device,
            parallel.control,
            watched.beat,
        )
        hooks.append(ScoreCheckpoints(scores, checkpoints))
    return hooks


def _make_loop(
    job: Job,
    engine: Engine,
    parallel: Parallel,
    options: StartOptions,
    hooks: Hooks,
    checkpoints: restore.RunCheckpoints,
    steering: Steering | None,
) -> Loop:
    run = job.run
    held_out = None
    if run.evaluate is not None:
        held_out = load_evaluator(
            job.held_out, run.evaluate, parallel, run.data, run.micro_batch_tokens
        )
    return Loop(
        job.plan,
        training_steps(
            job.plan, parallel, run.data, None if steering is None else steering.decided
        ),
        build_lr_schedule(job),
        engine,
        parallel,
        build_loop_options(job, parallel, options.stop_after),
        hooks=hooks.hooks,
        checkpoints=checkpoints,
        evaluator=held_out,
        mixing=steering,
    )


def _is_finished(job: Job, parallel: Parallel) -> bool:
    """Return True if the run is complete. Rank 0 decides. Collective."""
    control = parallel.control
    return bool(broadcast_first(run_on_first(lambda: records.is_finished(job), control), control))


def _join(job: Job, options: StartOptions) -> Parallel:
    """Join the process group, and check that all ranks start the same run. Collective."""
    run = job.run
    assert run.device != "auto"
    # The launcher times out first: it can report every rank's stack.
    timeout = max(MINIMUM_TIMEOUT, timedelta(seconds=run.watch.stall_seconds + 60))
    join_group(job, timeout, timedelta(seconds=run.watch.join_seconds))
    # Before the layout's groups: ranks with different layouts would wait for each other.
    read_agreed("the run", lambda: collect_facts(job, options), dict)
    shared = shared_modules(run.layout, job.model, job.cuts)
    return create_groups(run.layout, run.device, timeout, shared)


def build_lr_schedule(job: Job) -> Callable[[int], float]:
    """Return a function from steps to learning rates."""
    from ..loop.synthetic import SyntheticPlan

    plan, peak = job.plan, job.run.optimizer.lr
    if isinstance(plan, SyntheticPlan):
        return lambda step: peak * plan.lr_factor(step)
    from ...dataplane.order.plan import Plan
    from ...mixtures.learning_rate import lr_factor

    assert isinstance(plan, Plan)
    return lambda step: peak * lr_factor(plan, step)


def _open_recorder(
    job: Job, parallel: Parallel, options: StartOptions, state: RunState
) -> RunRecorder | NullRecorder:
    """Truncate the records to the checkpoint's state, and open them on rank 0. Collective."""

    def open_records() -> RunRecorder:
        check_late_errors()
        records.truncate_to_checkpoint(
            job.folder,
            job.plan,
            state,
            new_ledger=options.new_ledger,
            keep_tails=job.run.checkpoints.keep_abandoned,
        )
        return _make_recorder(job, parallel.world, options.began, state.step)

    return run_on_first(open_records, parallel.control) or NullRecorder()


def _open_steering(
    job: Job, parallel: Parallel, recorder: RunRecorder | NullRecorder, state: RunState
) -> Steering | None:
    """Read the run's decisions on rank 0, for all ranks; None for synthetic rows. Collective."""
    from ..loop.synthetic import SyntheticPlan

    if isinstance(job.plan, SyntheticPlan):
        return None
    from ...dataplane.order.plan import Plan
    from ..loop.mixing.decided_plan import DecidedPlan
    from ..loop.mixing.pilot import Pilot

    plan, control = job.plan, parallel.control
    assert isinstance(plan, Plan)
    read = partial(records.read_decisions, job.folder, plan, state)
    decided = DecidedPlan(plan, broadcast_first(run_on_first(read, control) or [], control))
    pilot = None
    if parallel.first:
        pilot = Pilot(decided, job.folder.root, state.mixing, recorder.event)
    return Steering(decided, pilot, control)


def _make_recorder(job: Job, ranks: int, began: float, first_step: int) -> RunRecorder:
    watch, device = job.run.watch, job.run.device
    peak = watch.peak_flops or speed.device_peak(device)
    counts = speed.count_speed(
        job.model,
        {phase.seq_len for phase in job.plan.phases} | {*filter(None, job.plan.lengths)},
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
            watch.straggler, watch.straggler_steps, stages, partial(stage_flops, job)
        ),
        noise=NoiseScale.restore(job.folder.signals),
        requested_at=began,
    )


def _step_reached(folder: RunFolder) -> int:
    last = lines.read_last(folder.ledger)
    return int(last["step"]) if last else 0
