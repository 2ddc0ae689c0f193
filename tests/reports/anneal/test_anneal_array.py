"""`trainer anneal --slurm` on a real Slurm: a task for each run, a rank on each of two nodes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ranks import slurm_cluster
from support.ranks.slurm_cluster import Cluster

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    slurm_cluster.install()
    result = Cluster(tmp_path)
    result.start()
    yield result
    result.stop()


def test_an_array_trains_all_candidates(
    inside: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    words = ["main", "digits.yaml", "--grid", "digits=0.2,0.4", "--out", "array", "slurm.nodes=2"]
    words += ["slurm.processes=1", "slurm.setup=export GLOO_SOCKET_IFNAME=lo"]
    command = [sys.executable, "-m", "headrace.trainer.cli", "anneal", *words]
    submitted = subprocess.run([*command, "--slurm"], capture_output=True, text=True, check=True)
    assert "submitted as array" in submitted.stderr
    deadline = time.monotonic() + 600
    while cluster.ask("squeue", "-h"):
        assert time.monotonic() < deadline
        time.sleep(1)
    report = subprocess.run(
        [*command, "--report", "--json"], capture_output=True, text=True, check=True
    )
    result = json.loads(report.stdout)
    assert len(result["candidates"]) == 2 and not result["waiting"]
    again = subprocess.run([*command, "--slurm"], capture_output=True, text=True, check=False)
    assert again.returncode == 1 and "are finished" in again.stderr
