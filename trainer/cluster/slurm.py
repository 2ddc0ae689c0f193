"""A run as a batch job of Slurm, which starts it again until it is finished.

    sbatch ─► srun ─► one process for each GPU of each node: the same command, as rank n of N
                │ exit code 85: saved, and time is up
                └─► scontrol requeue: the same job once more, which goes on

The script holds the command that a person typed, and nothing that this machine would decide: what
is left open is resolved where it runs.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...console.errors import MissingError, RunError
from ..folder import SLURM_LOG
from .ranks import INTERRUPTED


@dataclass(frozen=True, kw_only=True)
class SlurmConfig:
    """The batch job that `--slurm` submits."""

    nodes: int = 1
    """Machines."""
    gpus: int | None = None
    """Of each node; each has a process. Left out: the run is on CPU."""
    processes: int | None = None
    """Of each node; one for each GPU, or one, if left out."""
    time: str | None = None
    """How long a job may run, as sbatch takes it: 24:00:00. The run goes on in the next."""
    partition: str | None = None
    """Where the job queues."""
    account: str | None = None
    """Who pays."""
    notice: int = 300
    """Seconds before the end of the job at which the run is told to save."""
    options: Mapping[str, str] = field(default_factory=dict)
    """More of sbatch's options by their long names: {mem: 0, constraint: h100}."""
    setup: str = ""
    """Lines of shell that come first: modules, environment."""

    def __post_init__(self) -> None:
        for name in ("nodes", "gpus", "processes", "notice"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")

    @property
    def per_node(self) -> int:
        return self.processes or self.gpus or 1

    @property
    def world(self) -> int:
        return self.nodes * self.per_node


def script(config: SlurmConfig, name: str, words: Sequence[str], *, logs: Path, cwd: Path) -> str:
    """The batch script that runs `trainer` with these words."""
    options = {
        "job-name": name,
        "nodes": config.nodes,
        "ntasks-per-node": config.per_node,
        "gpus-per-node": config.gpus,
        "time": config.time,
        "partition": config.partition,
        "account": config.account,
        "output": logs.absolute() / SLURM_LOG,
        "open-mode": "append",
        "signal": f"USR1@{config.notice}",
        **config.options,
    }
    asked = [f"#SBATCH --{key}={value}" for key, value in options.items() if value is not None]
    command = shlex.join([sys.executable, "-m", "headrace.trainer.cli", *words])
    setup = f"\n{config.setup.strip()}\n" if config.setup else ""
    return f"""#!/bin/bash
{chr(10).join(asked)}
#SBATCH --requeue

cd {shlex.quote(str(cwd.absolute()))} || exit 1
{setup}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))

srun --kill-on-bad-exit=1 bash -c '
  export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS
  export LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE={config.per_node}
  exec "$@"
' rank {command}
code=$?

# {INTERRUPTED}: saved before the end of the plan. The same job goes on when it is its turn again.
if [ $code -eq {INTERRUPTED} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit $code
"""


def submit(file: Path) -> str:
    """Hand the script to sbatch; what it says, the job's number."""
    if shutil.which("sbatch") is None:
        raise MissingError(
            "there is no sbatch here",
            hint=f"submit from a machine of the cluster: sbatch {file}",
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
