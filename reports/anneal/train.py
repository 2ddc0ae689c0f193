"""Train the candidates: each is a `trainer run`, one after the other or as a Slurm array."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ...console.errors import RunError
from ...dataplane.runlog import writer as lines
from ...dataplane.storage import storage
from ...trainer.cluster import slurm
from ...trainer.cluster.ranks import INTERRUPTED, die_with_parent
from ...trainer.run.config import RunConfig
from ..board.runs import status_of
from .folder import AnnealFolder, Entry


class Interrupted(Exception):
    """A run saved and stopped; the same command goes on."""


def train(folder: AnnealFolder, entries: Sequence[Entry], processes: int | None) -> None:
    """Train or resume the runs that are not finished. A run that fails does not end the others."""
    failed = []
    for entry in entries:
        if is_finished(folder, entry):
            continue
        code = _run(words(folder, entry, processes))
        if code == INTERRUPTED:
            raise Interrupted
        if code:
            failed.append(f"{folder.run_of(entry.number).root}: exit code {code}")
    if failed:
        raise RunError(
            f"{len(failed)} of {len(entries)} runs failed",
            where="\n" + "\n".join(f"    {line}" for line in failed),
            hint="their errors are above; the same command trains them again",
        )


def is_finished(folder: AnnealFolder, entry: Entry) -> bool:
    event = lines.last(folder.run_of(entry.number).events)
    return event is not None and status_of(event) == "finished"


def words(folder: AnnealFolder, entry: Entry, processes: int | None) -> list[str]:
    """Return the words of `trainer` that train a candidate's run."""
    given = [] if processes is None else ["--processes", str(processes)]
    return [
        "run",
        str(folder.settings),
        *("--model", str(folder.model)),
        *("--mixture", str(folder.mixture(entry.number))),
        *("--out", str(folder.run_of(entry.number).root)),
        *given,
    ]


def submit(
    folder: AnnealFolder, entries: Sequence[Entry], run: RunConfig, command: Sequence[str]
) -> str:
    """Submit a Slurm array with a task for each run that is not finished; return its number.
    `command` are the words of this command, to which a task adds its number."""
    waiting = [entry.number for entry in entries if not is_finished(folder, entry)]
    if not waiting:
        raise RunError(
            f"all runs of {folder.root} are finished", hint="rank them: leave --slurm out"
        )
    folder.logs.mkdir(exist_ok=True)
    storage.write(str(folder.slurm), script(folder, run, command, waiting).encode())
    return slurm.submit(folder.slurm)


def script(
    folder: AnnealFolder, run: RunConfig, command: Sequence[str], tasks: Sequence[int]
) -> str:
    return slurm.script(
        run.slurm, folder.root.name, command, logs=folder.logs, cwd=Path.cwd(), tasks=tasks
    )


def _run(arguments: Sequence[str]) -> int:
    """Run `trainer`, and hand on the signals that ask it to save and stop. Ctrl-C reaches it from
    the terminal."""
    command = [sys.executable, "-P", "-m", "headrace.trainer.cli", *arguments]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)

    def forward(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            child.send_signal(number)

    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    before = {number: signal.signal(number, forward) for number in numbers}
    try:
        return child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
