"""Train the candidates with `trainer run`, in sequence or as a Slurm array."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ...console.errors import RunError
from ...console.progress import exact_count
from ...dataplane.runlog import writer as lines
from ...dataplane.storage import storage
from ...trainer.cluster import slurm
from ...trainer.cluster.ranks import INTERRUPTED, die_with_parent
from ...trainer.run.config import RunConfig
from ..board.runs import derive_status
from .folder import AnnealFolder, Entry


class Interrupted(Exception):
    """A run saved and stopped; the same command continues it."""


def train(folder: AnnealFolder, entries: Sequence[Entry], processes: int | None) -> None:
    """Train or resume the unfinished runs. A failed run does not stop the next ones."""
    failed = []
    for entry in entries:
        if is_finished(folder, entry):
            continue
        code = run_trainer(run_arguments(folder, entry, processes))
        if code == INTERRUPTED:
            raise Interrupted
        if code:
            failed.append(f"{folder.run_folder(entry.number).root}: exit code {code}")
    if failed:
        raise RunError(
            f"{len(failed)} of {exact_count(len(entries), 'runs')} failed",
            where="\n" + "\n".join(f"    {line}" for line in failed),
            hint="their errors are above; the same command trains them again",
        )


def is_finished(folder: AnnealFolder, entry: Entry) -> bool:
    event = lines.read_last(folder.run_folder(entry.number).events)
    return event is not None and derive_status(event) == "finished"


def run_arguments(folder: AnnealFolder, entry: Entry, processes: int | None) -> list[str]:
    """Return `trainer` arguments that train a candidate's run."""
    return [
        "run",
        str(folder.settings),
        *("--model", str(folder.model)),
        *("--mixture", str(folder.mixture_file(entry.number))),
        *("--out", str(folder.run_folder(entry.number).root)),
        *([] if processes is None else ["--processes", str(processes)]),
    ]


def submit(
    folder: AnnealFolder, entries: Sequence[Entry], run: RunConfig, command: Sequence[str]
) -> str:
    """Submit a Slurm array with a task for each unfinished run; return the array's job number.

    A task runs `command` and its task number.
    """
    waiting = [entry.number for entry in entries if not is_finished(folder, entry)]
    if not waiting:
        raise RunError(
            f"all runs of {folder.root} are finished", hint="rank them: leave --slurm out"
        )
    folder.logs.mkdir(exist_ok=True)
    script = slurm.render_script(
        run.slurm, folder.root.name, command, logs=folder.logs, cwd=Path.cwd(), tasks=waiting
    )
    storage.write(str(folder.slurm), script.encode())
    return slurm.submit(folder.slurm)


def run_trainer(arguments: Sequence[str]) -> int:
    """Run `trainer` and return its exit code. Forwards the signals that ask it to save and stop,
    except Ctrl-C, which the terminal sends to both."""
    command = [sys.executable, "-P", "-m", "headrace.trainer.cli", *arguments]
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)

    def forward(number: int, frame: FrameType | None) -> None:
        if number != signal.SIGINT:
            child.send_signal(number)

    signals = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
    previous_handlers = {number: signal.signal(number, forward) for number in signals}
    try:
        return child.wait()
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)
