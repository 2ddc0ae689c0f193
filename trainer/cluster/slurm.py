"""Run as a Slurm batch job that requeues itself until the run is finished.

    sbatch ─► srun ─► a process for every GPU on every node: the same command, as rank n of N
                │ rank 0 writes a note: saved, stopped, finished or failed
                └─► scontrol requeue, if the note says `saved`: the same job resumes the run

The script repeats the typed command. Values that depend on the machine, such as the device, are
resolved on the node where the job runs.

The note decides, not srun's exit code: srun ends the last ranks as soon as the first has exited,
and then returns a killed rank's code. The script removes the note when it starts, so a note always
belongs to this start. A start that has saved nothing is not requeued: it would end in the same way
again. The job's state in Slurm decides too: a cancelled job is never requeued, and after a node
failure Slurm itself requeues the job.
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
"""Environment variable with the note's path."""


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
        for key in ("nodes", "gpus", "processes", "notice"):
            value = getattr(self, key)
            if value is not None and value < 1:
                raise ValueError(f"{key} must be at least 1, not {value}")
        limit = parse_time_limit(self.time)
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


def parse_time_limit(time: str | None) -> int | None:
    """Parse M, M:S, H:M:S, D-H, D-H:M or D-H:M:S into seconds. Return None for further forms, which
    sbatch checks."""
    days, dash, clock = (time or "").rpartition("-")
    numbers = clock.split(":")
    units = (3600, 60, 1) if dash or len(numbers) == 3 else (60, 1)
    if len(numbers) > len(units) or not all(text.isdigit() for text in (days or "0", *numbers)):
        return None
    seconds = sum(int(number) * unit for number, unit in zip(numbers, units, strict=False))
    return int(days or 0) * 86400 + seconds


def render_script(
    config: SlurmConfig,
    job_name: str,
    arguments: Sequence[str],
    *,
    logs: Path,
    cwd: Path,
    tasks: Sequence[int] = (),
) -> str:
    """Render the batch script that runs `trainer` with `arguments`. With `tasks` it is an array,
    whose tasks add `--task` and their number."""
    options = {
        "array": ",".join(map(str, tasks)) or None,
        "job-name": job_name,
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
        f"#SBATCH --{_format_option(key, str(value))}"
        for key, value in options.items()
        if value is not None
    ]
    command = shlex.join([sys.executable, "-P", "-m", "headrace.trainer.cli", *arguments])
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


def _format_option(key: str, value: str) -> str:
    """Format an option as sbatch reads it in a script: outside quotes, a blank ends the value and
    `#` the line. A line break would begin a command, and only `setup` may contain commands."""
    if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or not value.isprintable():
        raise RunError(
            f"sbatch takes no option {f'--{key}={value}'!r}",
            hint="options have the long names of sbatch, and values of one line (keys `slurm`)",
        )
    if re.fullmatch(r"[\w@%+=:,./\[\]-]*", value):
        return f"{key}={value}"
    quoted = re.sub(r'(["\\])', r"\\\1", value)
    return f'{key}="{quoted}"'


def write_note(state: str, step: int) -> None:
    """Write this start's state for the batch script, if this is a batch job."""
    file = os.environ.get(NOTE)
    if file is not None:
        storage.write(file, f"{state} {step}\n".encode())


def submit(file: Path) -> str:
    """Submit the script and return the job number."""
    if shutil.which("sbatch") is None:
        raise MissingError(
            "sbatch is not installed on this machine",
            hint=f"submit from a login node of the cluster: sbatch {file}",
        )
    result = subprocess.run(
        ["sbatch", "--parsable", str(file)], capture_output=True, text=True, check=False
    )
    if result.returncode:
        raise RunError(
            f"sbatch refused {file}: {result.stderr.strip() or result.stdout.strip()}",
            hint="fix `slurm:` in the run's YAML (--dry-run shows the script)",
        )
    return result.stdout.strip().partition(";")[0]
