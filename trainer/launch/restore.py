"""Load weights for a start or a rollback.

A start takes the first of these that exists:

1. the run's newest checkpoint
2. the parent's checkpoint, for a mixture that branches (`after`)
3. `init_from`: a run, a checkpoint or another program's folder, with or without moments
4. freshly initialised weights
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ... import __version__
from ...console import config as reader
from ...console import log as logs
from ...console.errors import CheckpointError
from ...models.model.model import initial_weights
from ..checkpoints import saver as savers
from ..checkpoints import store
from ..checkpoints.fragments import begin_averages, masters
from ..checkpoints.policy import is_planned
from ..checkpoints.store import RunState
from ..cluster.agreement import broadcast_first, read_agreed, run_on_first
from ..engines.engine import Engine, load_weights
from ..layout.groups import Parallel
from ..run.job import Job
from ..weights.source import Checkpoint, WeightSource

log = logs.get_logger(__name__)


class RunCheckpoints(savers.Saver):
    """Saves checkpoints while a run trains, and loads them for a rollback."""

    def __init__(
        self, job: Job, engine: Engine, parallel: Parallel, report: savers.ReportSave
    ) -> None:
        texts = {store.MODEL: reader.dump(job.model)}
        super().__init__(
            job.folder.checkpoints,
            job.run.checkpoints,
            parallel.checkpoint,
            job.ends,
            texts,
            report=report,
        )
        self.job = job
        self.engine = engine
        self.parallel = parallel

    def restore(self) -> RunState:
        """Load the newest planned checkpoint into the engine. Collective."""
        return roll_back(self.job, self.engine, self.parallel)


def list_checkpoints(job: Job, parallel: Parallel) -> list[Path]:
    """Return the run's checkpoints, oldest first. Collective.

    Rank 0 lists them: on a shared file system, another machine's listing may be stale.
    """
    folder, control = job.folder.checkpoints, parallel.control
    listed = run_on_first(lambda: [path.name for path in store.committed(folder)], control)
    return [folder / name for name in broadcast_first(listed, control) or ()]


def load_initial_state(
    job: Job, engine: Engine, parallel: Parallel, saved: Sequence[Path], *, fallback: bool
) -> tuple[RunState, str | None]:
    """Load the newest checkpoint in `saved`, or the initial weights. Return the run's state and the
    source of the weights; None: a fresh initialisation. Collective."""
    if saved:
        state, path = _load_newest(job, engine, parallel, saved, fallback=fallback)
        return state, str(path)
    state = _first_state(job)
    origin = read_agreed("the initial weights", job.origin, _identity, parallel.control)
    if origin is None:
        load_weights(engine, initial_weights(job.model, job.run.seed))
        return state, None
    if not isinstance(origin, Checkpoint):
        load_weights(engine, origin.weights())
        return state, origin.where
    fragments = engine.fragments()
    source = job.run.init_from
    with_moments = source is None or source.moments
    if not with_moments:
        fragments = masters(fragments)
    origin_state = savers.load(origin.where, fragments, parallel.checkpoint)
    if not with_moments:
        begin_averages(engine.fragments())
    engine.loaded(origin_state.updates if with_moments else 0)
    ledger = origin_state.ledger if job.parent is not None else state.ledger
    return replace(state, updates=engine.updates, ledger=ledger), origin.where


def _identity(origin: WeightSource | None) -> dict[str, Any]:
    """Return facts about the weights that all ranks compare: file names and sizes, or a
    checkpoint's step, because loading compares a checkpoint's contents."""
    if origin is None or isinstance(origin, Checkpoint):
        return {"checkpoint": origin and store.parse_step(origin.where)}
    files = sorted(path for path in Path(origin.where).iterdir() if path.is_file())
    return {path.name: path.stat().st_size for path in files}


def roll_back(job: Job, engine: Engine, parallel: Parallel) -> RunState:
    """Load the newest planned checkpoint. Collective.

    Checkpoints from interruptions do not count, so a run that was stopped and resumed rolls back
    to the same step as an undisturbed run.
    """
    every, edges = job.run.checkpoints.every, [job.plan.first_step, *job.ends]
    saved = list_checkpoints(job, parallel)
    planned = [path for path in saved if is_planned(store.parse_step(path), every, edges)]
    newest = (planned or saved)[-1]
    state = savers.load(newest, engine.fragments(), parallel.checkpoint)
    engine.loaded(state.updates)
    return state


def _load_newest(
    job: Job, engine: Engine, parallel: Parallel, saved: Sequence[Path], *, fallback: bool
) -> tuple[RunState, Path]:
    for path in reversed(saved):
        try:
            state = savers.load(path, engine.fragments(), parallel.checkpoint)
        except CheckpointError as error:
            if not fallback or path is saved[0]:
                raise
            if parallel.first:
                log.warning("%s", error.message)
            continue
        if state.plan_hash != job.plan.hash:
            raise CheckpointError(
                f"{path} was saved by a run with another plan ({state.plan_hash}, not "
                f"{job.plan.hash})",
                hint="restore the plan.json of these checkpoints; to continue with another "
                f"mixture, start a run in another folder with `after: {{run: "
                f"{job.folder.root}, step: {state.step}}}`",
            )
        engine.loaded(state.updates)
        if parallel.first:
            log.info("resuming from %s, step %d", path, state.step)
        run_on_first(partial(store.set_aside, job.folder.checkpoints, state.step), parallel.control)
        return replace(state, **_saved_by(job)), path
    raise AssertionError("unreachable")


def _first_state(job: Job) -> RunState:
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
    )
    return replace(state, **_saved_by(job))


def _saved_by(job: Job) -> dict[str, Any]:
    return {"layout": job.layout, "headrace": __version__, "torch": torch.__version__}
