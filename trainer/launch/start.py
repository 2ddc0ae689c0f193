"""Start a resolved job: here, under torchrun, or as a batch job. Write the report at the end."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ...console import command
from ...console.log import get_logger
from ...console.progress import exact_count, format_number
from ...dataplane.order.plan import Plan
from ...dataplane.runlog import ledger
from ...dataplane.runlog import writer as lines
from ...dataplane.storage import storage
from ..accounting import about as about_file
from ..accounting import measured
from ..accounting.describe import describe
from ..checkpoints import store
from ..checkpoints.store import RunState
from ..cluster import ranks, slurm
from ..cluster.lost_ranks import naming_lost_ranks
from ..loop import evaluate
from ..record.mirror import Mirror
from ..record.steps import build_event
from ..run.job import Job
from ..scores import at_checkpoints
from . import launcher, preflight, records
from .options import StartOptions
from .template import Template

log = get_logger(__name__)

WriteReport = Callable[[str], Path]
"""Writes the report for a run's folder, and returns its path. The trainer imports no report."""


def submit(job: Job, words: Sequence[str]) -> str:
    """Write the batch script into the run's folder and submit it. Return Slurm's job number."""
    job.folder.prepare()
    storage.write(str(job.folder.slurm), batch_script(job, words).encode())
    return slurm.submit(job.folder.slurm)


def batch_script(job: Job, words: Sequence[str]) -> str:
    folder = job.folder
    job_name = folder.root.absolute().name
    return slurm.render_script(job.run.slurm, job_name, words, logs=folder.logs, cwd=Path.cwd())


def start(
    job: Job,
    options: StartOptions,
    asked: ranks.StopRequest,
    forks: Template | None,
    write_report: WriteReport,
) -> int:
    """Run the job here, as forks, or join it as a rank, and write its report. Return the exit
    code."""
    if ranks.is_rank():
        return _join(job, options, asked, write_report)
    if _is_finished(job):
        _finish_again(job, write_report)
        return 0
    assert forks is not None and job.run.device != "auto"
    forks.call(partial(job.engine.load, job.run.device))
    preflight.check_machine(job)
    job.folder.prepare()
    with job.folder.locked() as lock:
        _prepare(job)
        code = launcher.Launcher(
            forks,
            [str(job.folder.root), options.to_json()],
            job.processes,
            threads=job.threads,
            logs=job.folder.logs,
            lock=lock,
            stall_seconds=job.run.watch.stall_seconds,
            rank_name=lambda rank: job.run.layout.rank_name(rank, job.processes),
        ).run()
        _finish(job, code, write_report)
        return code


def describe_outcome(job: Job, code: int) -> dict[str, Any]:
    """Return the run's outcome, for --json."""
    last = lines.read_last(job.folder.metrics)
    saved = store.committed(job.folder.checkpoints)
    return {
        "run": str(job.folder.root),
        "finished": code == 0,
        "exit_code": code,
        "step": store.parse_step(saved[-1]) if saved else job.plan.first_step,
        "last_step": job.plan.end_step,
        "loss": last["loss"] if last else None,
        "plan_hash": job.plan.hash,
        "report": str(job.folder.report),
    }


def _is_finished(job: Job) -> bool:
    """Return True, and print a message, if the run has taken all steps."""
    if not records.is_finished(job):
        return False
    command.say(f"{job.folder.root} has already taken all of its {job.plan.end_step} steps")
    return True


def _finish_again(job: Job, write_report: WriteReport) -> None:
    """Repeat what follows the last step: the run may have been killed before it was complete."""
    if not os.access(job.folder.root, os.W_OK):  # an archived run is read only
        command.say(f"report: {job.folder.report}")
        return
    with job.folder.locked():
        _clear(job)
        store.prune(job.folder.checkpoints, job.run.checkpoints, job.ends)
        _finish(job, 0, write_report)


def _clear(job: Job) -> None:
    """Remove partial files from killed starts."""
    job.folder.clear()
    store.clean(job.folder.checkpoints)


def _prepare(job: Job) -> None:
    _clear(job)
    job.save()  # run.yaml first: checkpoints without it cannot be attributed
    if job.run.checkpoints.url is not None:
        store.adopt(
            job.folder.checkpoints,
            job.run.checkpoints.url,
            job.identity,
            partial(_begin_ledger, job),
        )
    if job.run.evaluate is not None and not job.held_out.exists():
        evaluate.plan_held_out(job.run.evaluate, job.plan).save(job.held_out)
    if job.run.scores is not None:
        at_checkpoints.check(job.run.scores, job.plan)
    about_file.save_facts(job)
    about = describe(job)
    command.say(
        f"{about['model']['stripe']}  {format_number(about['model']['parameters'])} parameters, "
        f"{format_number(job.plan.tokens)} tokens in {exact_count(job.plan.steps, 'steps')}, "
        f"{about['layout']['engine']} on {job.processes} "
        f"process{'es' * (job.processes > 1)} → {job.folder.root}"
    )
    for warning in about["warnings"]:
        log.warning("%s", warning)


def _begin_ledger(job: Job, state: RunState) -> None:
    """Begin a ledger at the newest checkpoint, if the run's folder was lost."""
    if not job.folder.ledger.exists():
        ledger.begin(job.folder.ledger, records.last_ledger_entry(job.plan, state))


def _finish(job: Job, code: int, write_report: WriteReport) -> None:
    saved = store.committed(job.folder.checkpoints)
    if not saved:
        command.say(
            f"stopped before the first step; the same command starts it again (exit code {code})"
        )
        return
    if code == 0:
        _record_finish(job, store.read_state(saved[-1]))
    if comparison := measured.compare_run(job):
        measured.write(job.folder.measured, comparison)
        command.say("\n".join(measured.lines(comparison)))
    else:
        job.folder.measured.unlink(missing_ok=True)  # of an earlier start, under another layout
    path = write_report(str(job.folder.root))
    if job.run.watch.mirror is not None:
        Mirror(job.folder, job.run.watch.mirror).update(final=True)
    if code == ranks.INTERRUPTED:
        command.say(
            f"saved at step {store.parse_step(saved[-1])} of {job.plan.end_step} "
            f"(exit code {code}); to go on: trainer resume {shlex.quote(str(job.folder.root))}"
        )
    newest = ledger.read_last(job.folder.ledger)
    if newest is not None and isinstance(job.plan, Plan):
        commitment = ledger.commit(job.folder.ledger, job.plan.learnt_hash, newest.step)
        command.say(f"commitment to the plan and the ledger, to publish: {commitment}")
    command.say(f"report: {path}")


def _record_finish(job: Job, last: RunState) -> None:
    """Write the event `finish` if it is missing: the run may have been killed before it."""
    events = list(lines.read(job.folder.events))
    if not events or events[-1]["event"] != "finish":
        with contextlib.closing(lines.LineWriter(job.folder.events)) as writer:
            writer.write(build_event("finish", last.step, ledger=last.ledger))


def _join(
    job: Job, options: StartOptions, asked: ranks.StopRequest, write_report: WriteReport
) -> int:
    """Run as a rank under torchrun. Rank 0 locks the folder; the other ranks wait for rank 0."""
    from .worker import work

    preflight.check_compiler(job)

    def train() -> int:
        watched = ranks.Watched()
        rank_name = job.run.layout.rank_name(watched.rank, job.processes)
        with (
            watched.watching_itself(job.run.watch.stall_seconds, rank_name),
            naming_lost_ranks(rank_name, watched.ports_by_rank),
        ):
            return work(job, watched, asked, options)

    if not ranks.is_first():
        code = train()
        # A rank that stops with all others is no failure: torchrun must not kill rank 0 for it.
        return 0 if code == ranks.INTERRUPTED else code
    if _is_finished(job):
        train()  # the other ranks learn it from rank 0
        _finish_again(job, write_report)
        return 0
    preflight.check_disk(job)
    preflight.check_host_memory(job)
    job.folder.prepare()
    with job.folder.locked():
        _prepare(job)
        code = train()
        _finish(job, code, write_report)
        return code
