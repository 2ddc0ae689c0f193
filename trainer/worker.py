"""One process of a run: joins the others, builds the engine, finds the checkpoint, trains.

The launcher starts it as `python -m headrace.trainer.worker FOLDER`; under torchrun, the command
itself becomes this.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from .. import __version__
from ..console import config as reader
from ..console import log as logs
from ..console.errors import CheckpointError, UserError
from ..models.model import Model
from . import job as jobs
from . import launch, lines, peak, rows
from .checkpoints import saver as savers
from .checkpoints import store
from .checkpoints.fragments import MASTER, fill, keyed
from .checkpoints.policy import is_planned
from .checkpoints.store import RunState
from .engines import build
from .engines.engine import Engine
from .folder import RunFolder
from .job import Job
from .layout import Parallel, join
from .loop import Loop, Options
from .objective import Objective
from .origin import Checkpoint
from .profiling import Profiler
from .records import Records, Silent
from .request import Start, steps_between
from .schedule import Plan

TIMEOUT = timedelta(minutes=30)

log = logs.get_logger(__name__)


class StopAsked:
    """Notes that someone asked the run to save and make room."""

    def __init__(self) -> None:
        self.asked = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def __call__(self) -> bool:
        return self.asked


def work(job: Job, watched: launch.Watched, wanted: Start) -> int:
    """Train until the plan's end, or until asked to stop. Returns the exit code."""
    began = time.time()
    asked = StopAsked()
    run, plan, folder = job.run, job.plan, job.folder
    assert run.precision != "auto" and run.device != "auto"
    torch.set_num_threads(job.threads)
    if run.deterministic and run.device == "cuda":  # on CPU they are, given the threads
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS refuses
        torch.use_deterministic_algorithms(True)
    launch.initialise("cpu:gloo,cuda:nccl" if run.device == "cuda" else "gloo", TIMEOUT)
    parallel = join(run.layout, run.device, TIMEOUT)

    engine = build_engine(job, parallel)
    resumed = bool(store.committed(folder.checkpoints))
    state, came_from = find_state(job, engine, parallel, fallback=wanted.fallback)
    if parallel.first:
        _cut_back(folder, state.step)
    dist.barrier(parallel.control)

    keeper = savers.Saver(
        folder.checkpoints,
        run.checkpoints,
        parallel.checkpoint,
        keep=_ends(plan),
        texts={store.MODEL: reader.dump(job.model)},
    )
    if run.watch.guard.may_roll_back and not resumed:  # there must be something to go back to
        keeper.save(engine.fragments(), state)
        keeper.wait()
    records: Records | None = None
    if parallel.first:
        speed = peak.speed(job, parallel.world)
        records = Records(
            folder.root,
            plan,
            speed,
            run.watch,
            first_step=state.step,
            memory=partial(peak.memory_used, run.device),
        )
        records.event(
            "resume" if resumed else "start",
            state.step,
            layout=layout_of(job),
            checkpoint=came_from,
            seconds=round(time.time() - began, 2),
        )
    profiler = None
    if wanted.profile is not None:
        profiler = Profiler(folder.profiles, wanted.profile, parallel.rank)

    def begin(step: int) -> None:
        watched.beat(step)
        if profiler is not None:
            profiler.begin(step)

    loop = Loop(
        plan,
        rows.steps_of(job, parallel),
        lr_of(job),
        engine,
        parallel,
        Options(
            micro_batch_tokens=run.micro_batch_tokens,
            seed=run.seed,
            guard=run.watch.guard,
            save_every=run.checkpoints.every,
            stop_after=wanted.stop_after,
        ),
        recorder=records or Silent(),
        saver=keeper,
        evaluator=rows.evaluator_of(job, parallel),
        restore=lambda: go_back(job, engine, parallel),
        stop_asked=asked,
        begin=begin,
    )
    try:
        state, finished = loop.run(state)
        if records is not None:
            records.event("finish" if finished else "stop", state.step, ledger=state.ledger)
    except UserError as error:
        if records is not None:
            records.event("fail", _step_reached(folder), error=str(error))
        raise
    finally:
        if profiler is not None:
            profiler.close()
        if records is not None:
            records.close()
    dist.barrier(parallel.control)
    dist.destroy_process_group()
    return 0 if finished else launch.INTERRUPTED


def build_engine(job: Job, parallel: Parallel) -> Engine:
    model = Model(job.model)
    model.init_weights(job.run.seed)
    model.divide(parallel.axes)
    model.checkpointing = job.run.recompute
    precision = job.run.precision
    assert precision != "auto"
    objective = Objective(model, job.run.z_loss)
    return build(job.run.engine, objective, job.run.optimizer, precision, parallel)


def find_state(
    job: Job, engine: Engine, parallel: Parallel, *, fallback: bool
) -> tuple[RunState, str | None]:
    """Load the newest checkpoint, or the one that the run begins from, or begin. Collective."""
    found = store.committed(job.folder.checkpoints)
    if found:
        state, path = _load_newest(job, engine, parallel, found, fallback=fallback)
        return state, str(path)
    first = job.plan.step(job.plan.first_step)
    state = RunState(
        step=first.number,
        row=first.first_row,
        tokens=first.first_token,
        plan_hash=job.plan.hash,
        updates=0,
        ledger=job.plan.hash,
        seed=job.run.seed,
        run=job.identity,
        layout=layout_of(job),
        headrace=__version__,
        torch=torch.__version__,
    )
    origin = job.origin()
    if origin is None:
        return state, None
    if not isinstance(origin, Checkpoint):
        fill(engine.fragments(), {keyed(MASTER, n): t for n, t in origin.weights().items()})
        engine.loaded(0)
        return state, origin.where
    fragments = engine.fragments()
    source = job.run.init_from
    if source is not None and not source.moments:
        fragments = [f for f in fragments if f.key.startswith(keyed(MASTER, ""))]
    there = savers.load(origin.where, fragments, parallel.checkpoint)
    engine.loaded(there.updates if source is None or source.moments else 0)
    ledger = there.ledger if job.parent is not None else state.ledger
    return replace(state, updates=engine.updates, ledger=ledger), origin.where


def _load_newest(
    job: Job, engine: Engine, parallel: Parallel, found: Sequence[Path], *, fallback: bool
) -> tuple[RunState, Path]:
    for path in reversed(found):
        try:
            state = savers.load(path, engine.fragments(), parallel.checkpoint)
        except CheckpointError as error:
            if not fallback or path is found[0]:
                raise
            if parallel.first:
                log.warning("%s", error.what)
            continue
        if state.plan_hash != job.plan.hash:
            raise CheckpointError(
                f"{path} was saved by a run with another plan ({state.plan_hash}, not "
                f"{job.plan.hash})",
                mend="put the folder's own plan.json and checkpoints back together; another "
                f"mixture goes on from here in a folder of its own, with `after: {{run: "
                f"{job.folder.root}, step: {state.step}}}`",
            )
        engine.loaded(state.updates)
        if parallel.first:
            log.info("going on from %s, step %d", path, state.step)
            store.set_aside(job.folder.checkpoints, state.step)
        layout = layout_of(job)
        return replace(state, layout=layout, headrace=__version__, torch=torch.__version__), path
    raise AssertionError("unreachable")


def go_back(job: Job, engine: Engine, parallel: Parallel) -> RunState:
    """Take the weights and moments of the newest checkpoint, but for those of interruptions: a run
    that was stopped and resumed goes back as far as one that never was. Collective."""
    every, edges = job.run.checkpoints.every, [job.plan.first_step, *_ends(job.plan)]
    found = store.committed(job.folder.checkpoints)
    planned = [path for path in found if is_planned(store.step_of(path), every, edges)]
    newest = (planned or found)[-1]
    state = savers.load(newest, engine.fragments(), parallel.checkpoint)
    engine.loaded(state.updates)
    return state


def _ends(plan: Plan) -> list[int]:
    """Where phases end: these checkpoints stay for good."""
    return [phase.first_step + phase.steps for phase in plan.phases]


def lr_of(job: Job) -> Callable[[int], float]:
    from .synthetic import SyntheticPlan

    plan, top = job.plan, job.run.optimizer.lr
    if isinstance(plan, SyntheticPlan):
        return lambda step: top * plan.lr_factor(step)
    from ..dataplane.plan import Plan as MixturePlan
    from ..mixtures.schedule import lr_factor

    assert isinstance(plan, MixturePlan)
    return lambda step: top * lr_factor(plan, step)


def layout_of(job: Job) -> dict[str, object]:
    return {
        "engine": job.run.engine.describe(),
        "processes": job.processes,
        "dp": job.dp,
        "tp": job.run.layout.tp,
        "cp": job.run.layout.cp,
        "precision": job.run.precision,
        "device": job.run.device,
        "threads": job.threads,
    }


def _cut_back(folder: RunFolder, step: int) -> None:
    """Take back what was recorded after the checkpoint; it stays beside the file."""
    for path in (folder.metrics, folder.ledger, folder.evaluations):
        kept = lines.cut(path, step)
        if kept is not None:
            log.info("%s is cut back to step %d; the rest is in %s", path.name, step, kept.name)


def _step_reached(folder: RunFolder) -> int:
    steps = [int(entry["step"]) for entry in lines.read(folder.ledger)]
    return steps[-1] if steps else 0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--stop-after", type=int)
    parser.add_argument("--fallback", action="store_true")
    parser.add_argument("--profile", type=steps_between)
    parser.add_argument("--debug", action="store_true")
    arguments = parser.parse_args()
    logs.setup(debug=arguments.debug)
    wanted = Start(
        stop_after=arguments.stop_after, fallback=arguments.fallback, profile=arguments.profile
    )
    watched = launch.Watched()
    try:
        job = jobs.load(RunFolder(arguments.folder))
        code = work(job, watched, wanted)
    except Exception as error:
        watched.fail(error)  # the launcher says it
        sys.exit(1)
    sys.exit(code)


if __name__ == "__main__":
    main()
