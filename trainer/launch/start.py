"""From a resolved job to running processes, and to the report at the end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...console import command
from ...console.log import get_logger
from ...console.progress import human
from ...dataplane.runlog import writer as lines
from ...dataplane.storage import storage
from ..checkpoints import store
from ..cluster import ranks as group
from ..cluster import slurm
from ..costs.describe import describe
from ..loop import evaluate
from ..record.steps import event
from ..run.request import Start
from ..run.run import Job
from . import launcher as launch
from . import preflight as checks

log = get_logger(__name__)


def submit(job: Job, words: Sequence[str]) -> str:
    """Write the batch script into the run's folder and submit it; returns the job's number."""
    job.folder.prepare()
    storage.write(str(job.folder.slurm), batch_script(job, words).encode())
    return slurm.submit(job.folder.slurm)


def batch_script(job: Job, words: Sequence[str]) -> str:
    folder = job.folder
    name = folder.root.absolute().name
    return slurm.script(job.run.slurm, name, words, logs=folder.logs, cwd=Path.cwd())


def start(job: Job, asked: Start) -> int:
    """Run the job here, or join it, and draw its report. Returns the exit code."""
    if group.joined():
        return _join(job, asked)
    if _finished(job):
        _finish_again(job)
        return 0
    checks.check_disk(job)
    job.folder.prepare()
    with job.folder.locked() as lock:
        _prepare(job)
        launcher = launch.Launcher(
            launch.python("headrace.trainer.launch.worker", str(job.folder.root), *asked.words()),
            job.processes,
            threads=job.threads,
            logs=job.folder.logs,
            keep_open=[lock],
            stall_seconds=job.run.watch.stall_seconds,
        )
        code = launcher.run()
        _finish(job, code)
        return code


def outcome(job: Job, code: int) -> dict[str, Any]:
    """What became of the run, for a program."""
    entries = list(lines.read(job.folder.metrics))
    found = store.committed(job.folder.checkpoints)
    return {
        "run": str(job.folder.root),
        "finished": code == 0,
        "exit_code": code,
        "step": store.step_of(found[-1]) if found else job.plan.first_step,
        "last_step": job.plan.last_step,
        "loss": entries[-1]["loss"] if entries else None,
        "plan_hash": job.plan.hash,
        "report": str(job.folder.report),
    }


def _finished(job: Job) -> bool:
    """Whether nothing is left to do; says so."""
    found = store.committed(job.folder.checkpoints)
    if not found or store.step_of(found[-1]) < job.plan.last_step:
        return False
    command.say(f"{job.folder.root} has taken all of its {job.plan.last_step} steps already")
    return True


def _finish_again(job: Job) -> None:
    """What a run does after its last step, once more: it may have been killed on the way."""
    if not os.access(job.folder.root, os.W_OK):  # put away, it is only looked at
        command.say(f"report: {job.folder.report}")
        return
    with job.folder.locked():
        _clear(job)
        store.prune(job.folder.checkpoints, job.run.checkpoints, job.ends)
        events = list(lines.read(job.folder.events))
        if not events or events[-1]["event"] != "finish":
            last = store.read_state(store.committed(job.folder.checkpoints)[-1])
            with contextlib.closing(lines.LineWriter(job.folder.events)) as writer:
                writer.write(event("finish", last.step, ledger=last.ledger))
        _finish(job, 0)


def _clear(job: Job) -> None:
    """Remove what starts that were killed left half written."""
    job.folder.clear()
    store.clean(job.folder.checkpoints)


def _prepare(job: Job) -> None:
    _clear(job)
    job.save()  # a folder with checkpoints and no run is nobody's
    if job.run.checkpoints.url is not None:
        store.adopt(job.folder.checkpoints, job.run.checkpoints.url, job.identity)
    if job.run.evaluate is not None and not job.held_out.exists():
        evaluate.plan_of(job.run.evaluate, job.plan).save(job.held_out)
    about = describe(job)
    command.say(
        f"{about['model']['stripe']}  {human(about['model']['parameters'])} parameters, "
        f"{human(job.plan.tokens)} tokens in {job.plan.steps} steps, "
        f"{about['layout']['engine']} on {job.processes} "
        f"process{'es' * (job.processes > 1)} → {job.folder.root}"
    )


def _finish(job: Job, code: int) -> None:
    from ..report import write

    found = store.committed(job.folder.checkpoints)
    if not found:
        command.say(f"stopped before its first step; the same command begins (exit code {code})")
        return
    path, _ = write([str(job.folder.root)], None)
    if code == group.INTERRUPTED:
        command.say(
            f"saved at step {store.step_of(found[-1])} of "
            f"{job.plan.last_step}; the same command goes on (exit code {code})"
        )
    command.say(f"report: {path}")


def _join(job: Job, asked: Start) -> int:
    """Under torchrun: rank 0 holds the folder; the others wait for its word in the group."""
    from .worker import work

    watched = group.Watched()
    if not group.speaks():
        code = work(job, watched, asked)
        # Who stops because all do is no failure that a launcher should end rank 0 for.
        return 0 if code == group.INTERRUPTED else code
    if job.run.watch.stall_seconds:
        log.info("the launcher watches the processes: watch.stall_seconds does nothing here")
    checks.check_disk(job)
    job.folder.prepare()
    with job.folder.locked():
        _prepare(job)
        code = work(job, watched, asked)
        _finish(job, code)
        return code
