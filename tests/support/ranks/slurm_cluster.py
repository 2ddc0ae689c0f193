"""A Slurm cluster for tests: munged, slurmctld and two slurmd on 127.0.0.1, all in one folder.

The nodes are named 127.0.0.1 and 127.0.0.2, so that ranks can connect to the names.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support.ranks.ports import free_ports

PACKAGES = ["slurmctld", "slurmd", "slurm-client", "munge"]
NODES = ("127.0.0.1", "127.0.0.2")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock,cred_expire=5
SlurmUser=root
SlurmdUser=root
SlurmctldPort={port}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SelectType=select/linear
KillWait=5
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
PartitionName=all Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=2
"""
"""Slurm waits for `cred_expire` seconds before it starts a requeued job again. A number below 5 is
invalid: Slurm then waits for 120."""
NODE = "NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=2\n"


def install() -> None:
    """Install Slurm, or skip the test."""
    if shutil.which("slurmctld") and shutil.which("munged") and shutil.which("sbatch"):
        return
    if os.geteuid() or shutil.which("apt-get") is None:
        pytest.skip(f"Slurm needs {', '.join(PACKAGES)}, which only root can install")
    run = subprocess.run(
        ["apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES],
        capture_output=True,
        text=True,
    )
    if run.returncode:
        pytest.skip(f"Slurm cannot be installed here: {run.stderr[-300:]}")


class Cluster:
    """A cluster with its files in `root`. The programs of Slurm find it by `environment`."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.processes: list[subprocess.Popen[bytes]] = []
        self.configuration = root / "slurm.conf"
        self.environment = {"SLURM_CONF": str(self.configuration)}

    def start(self) -> None:
        root, host, port = self.root, socket.gethostname(), free_ports(1 + len(NODES))
        for folder in (root / "state", root / "spool"):
            folder.mkdir(parents=True)
        text = CONFIGURATION.format(host=host, root=root, port=port)
        for number, name in enumerate(NODES, start=1):
            text += NODE.format(name=name, host=host, port=port + number)
        self.configuration.write_text(text)
        key = root / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = {"socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        options = [f"--{name}={root}/munge.{ending}" for name, ending in files.items()]
        self._spawn("munged", "--foreground", "--force", f"--key-file={key}", *options)
        self._wait((root / "munge.sock").exists)
        self._spawn("slurmctld", "-D")
        for name in NODES:
            self._spawn("slurmd", "-D", "-N", name)
        self._wait(lambda: self.ask("sinfo", "-h", "-o", "%D %t") == "2 idle")

    def cancel_all(self) -> None:
        for number in self.ask("squeue", "-h", "-o", "%i").split():
            self.ask("scancel", number)
        self._wait(lambda: not self.ask("squeue", "-h"))

    def stop(self) -> None:
        self.cancel_all()
        for process in reversed(self.processes):
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait(30)

    def ask(self, *command: str) -> str:
        """Run a program of Slurm; return its stdout."""
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """Return Slurm's record of a job: JobState, Reason, Restarts, ExitCode."""
        words = self.ask("scontrol", "--oneliner", "show", "job", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def _spawn(self, *command: str) -> None:
        with (self.root / "daemons.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    command, env={**os.environ, **self.environment}, stdout=log, stderr=log
                )
            )

    def _wait(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            if time.monotonic() > deadline:
                raise RuntimeError(f"Slurm does not respond; see {self.root}/daemons.log")
            time.sleep(0.1)
