"""A run as a Slurm batch job that requeues itself until the run is finished.

    sbatch ─► srun ─► one process for each GPU of each node: the same command, as rank n of N
                │ rank 0 writes a note: saved, stopped, finished or failed
                └─► scontrol requeue, if the note says `saved`: the same job resumes the run

The script repeats the command that was typed. Values that depend on the machine, such as the
device, are resolved on the node where the job runs.

The note decides, not the exit code of srun: srun ends the last ranks as soon as the first has
exited, and then returns the code of a killed rank. The script removes the note when it starts, so a
note is always of this start. A start that has saved nothing is not requeued: it would end in the
same way again. Slurm's state of the job decides too: a cancelled job is never requeued, and after
a node failure Slurm itself requeues the job.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from ...console.config import AsWritten
from ...console.errors import MissingError, RunError
from ...dataplane.storage import storage
from ..folders.folder import SLURM_LOG, SLURM_NOTE
from .ranks import INTERRUPTED

NOTE = "HEADRACE_NOTE"
"""Environment variable with the path of the note."""


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """The batch job that `--slurm` submits."""

    nodes: int = 1
    """Nodes of the job."""
    gpus: int | None = None
    """GPUs of each node, one rank for each. Default: the run is on CPU."""
    processes: int | None = None
    """Ranks of each node. Default: one for each GPU, or one."""
    time: str | None = None
    """Time limit of a job, as sbatch takes it: 24:00:00. The requeued job resumes the run."""
    partition: str | None = None
    """Partition of the cluster."""
    account: str | None = None
    """Account that is charged."""
    notice: int = 300
    """Seconds before the time limit at which the run saves and stops."""
    options: Mapping[str, Annotated[str | int, AsWritten()]] = field(default_factory=dict)
    """More options of sbatch by their long names, as sbatch reads them: {mem: 64G}."""
    setup: str = ""
    """Shell lines that run first: modules, environment."""

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "processes", "notice"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        limit = seconds_of(self.time)
        if limit is not None and self.notice >= limit:
            raise ValueError(
                f"notice is {self.notice} seconds before the time limit, and time={self.time} is "
                f"{limit} seconds: each job would stop after its first step"
            )

    @property
    def per_node(self) -> int:
        return self.processes or self.gpus or 1

    @property
    def world(self) -> int:
        return self.nodes * self.per_node


def seconds_of(time: str | None) -> int | None:
    """Return the seconds of a time limit: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S. None for another
    form, which sbatch judges."""
    days, dash, rest = (time or "").rpartition("-")
    words = rest.split(":")
    units = (3600, 60, 1) if dash or len(words) == 3 else (60, 1)
    if len(words) > len(units) or not all(word.isdigit() for word in (days or "0", *words)):
        return None
    parts = sum(int(word) * unit for word, unit in zip(words, units, strict=False))
    return int(days or 0) * 86400 + parts


def script(
    config: SlurmConfig,
    name: str,
    words: Sequence[str],
    *,
    logs: Path,
    cwd: Path,
    tasks: Sequence[int] = (),
) -> str:
    """Return the batch script that runs `trainer` with these words. `tasks` make it an array: each
    task adds `--task` and its number."""
    options = {
        "array": ",".join(map(str, tasks)) or None,
        "job-name": name,
        "nodes": config.nodes,
        "ntasks-per-node": config.per_node,
        "gpus-per-node": config.gpus,
        "time": config.time,
        "partition": config.partition,
        "account": config.account,
        "output": f"{logs.absolute()}".replace("%", "%%") + f"/{SLURM_LOG}",
        "open-mode": "append",
        "signal": f"USR1@{config.notice}",
        **config.options,
    }
    directives = [
        f"#SBATCH --{_directive(key, str(value))}"
        for key, value in options.items()
        if value is not None
    ]
    command = shlex.join([sys.executable, "-P", "-m", "headrace.trainer.cli", *words])
    note = shlex.quote(str(logs.absolute())) + f'/"{SLURM_NOTE.format(job="$SLURM_JOB_ID")}"'
    task = ' --task "$SLURM_ARRAY_TASK_ID"' if tasks else ""
    setup = f"\n{config.setup.strip()}\n" if config.setup else ""
    return f"""#!/bin/bash
{chr(10).join(directives)}
#SBATCH --requeue

cd {shlex.quote(str(cwd.absolute()))} || exit 1
{setup}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

export {NOTE}={note}
rm -f "${NOTE}" || exit 1

state() {{
  squeue -h -t all -j "$SLURM_JOB_ID" -o "%T %r"
}}
ended_by_slurm() {{
  [[ $(state) == *TimeLimit ]] || scontrol show job "$SLURM_JOB_ID" | grep -q "PreemptTime=[0-9]"
}}
requeue() {{
  [ -n "$requeued" ] && return
  grep -qs "^saved" "${NOTE}" && scontrol requeue "$SLURM_JOB_ID" && requeued=yes
}}

# At the time limit, or for a job of higher priority, Slurm sends SIGTERM, and some seconds later
# SIGKILL, also to this script. The ranks may save between the two, so the script looks for the note
# until they end.
at_end() {{
  ended_by_slurm || return
  until requeue || ! kill -0 $! 2>/dev/null; do sleep 0.2; done
}}
trap at_end TERM

srun --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
  export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE={config.per_node}
  exec "$@"
' rank {command}{task} &
wait $!
while kill -0 $! 2>/dev/null; do wait $!; done  # a signal has interrupted `wait`
wait $!
code=$?

grep -qs "^finished" "${NOTE}" && exit 0
grep -qs "^stopped" "${NOTE}" && exit {INTERRUPTED}
{{ [[ $(state) == RUNNING* ]] || ended_by_slurm; }} && requeue
exit $code
"""


def _directive(key: str, value: str) -> str:
    """Return an option as sbatch reads it in a script: a blank ends a value outside of quotes, and
    `#` the line. A line break would begin a command, and only `setup` may hold commands."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or not value.isprintable():
        raise RunError(
            f"sbatch takes no option {f'--{key}={value}'!r}",
            hint="options have the long names of sbatch, and values of one line (keys `slurm`)",
        )
    if re.fullmatch(r"[\w@%+=:,./\[\]-]*", value):
        return f"{key}={value}"
    quoted = re.sub(r'(["\\])', r"\\\1", value)
    return f'{key}="{quoted}"'


def note(word: str, step: int) -> None:
    """Write the state of this start for the batch script, if this is a batch job."""
    file = os.environ.get(NOTE)
    if file is not None:
        storage.write(file, f"{word} {step}\n".encode())


def submit(file: Path) -> str:
    """Submit the script. Return the job number that sbatch prints."""
    if shutil.which("sbatch") is None:
        raise MissingError(
            "sbatch is not installed on this machine",
            hint=f"submit from a login node of the cluster: sbatch {file}",
        )
    done = subprocess.run(
        ["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RunError(
            f"sbatch refused {file}: {done.stderr.strip() or done.stdout.strip()}",
            hint="fix `slurm:` in the run's YAML (--dry-run shows the script)",
        )
    return done.stdout.strip().partition(";")[0]
