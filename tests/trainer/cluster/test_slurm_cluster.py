"""Batch jobs on a real Slurm: two nodes, a rank on each."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ranks import slurm_cluster
from support.ranks.slurm_cluster import Cluster

from headrace.trainer.checkpoints import store
from headrace.trainer.folders.folder import SLURM_NOTE

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]

SLOW_DISK = """
import os, pathlib, time
seconds = pathlib.Path(__file__).with_name("seconds")
def slowly(descriptor, fsync=os.fsync):
    time.sleep(float(seconds.read_text()))
    fsync(descriptor)
os.fsync = slowly
"""
"""Python runs it at the start of each process. Each `fsync` takes as long as the file says."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    slurm_cluster.install()
    result = Cluster(tmp_path_factory.mktemp("slurm"))
    result.start()
    yield result
    result.stop()


@pytest.fixture(autouse=True)
def environment(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.environment.items():
        monkeypatch.setenv(name, value)
    cluster.cancel_all()  # jobs of a test that failed


class BatchJob:
    """A submitted run."""

    def __init__(self, trainer: Any, cluster: Cluster, *words: str, setup: str = "") -> None:
        self.cluster, self.out = cluster, trainer.out
        self.trainer = trainer
        nodes = ["slurm.nodes=2", "slurm.processes=1"]
        nodes += [f"slurm.setup=export GLOO_SOCKET_IFNAME=lo\n{setup}"]
        said = re.search(r"submitted as job (\d+)", trainer.run(*nodes, *words, "--slurm"))
        assert said is not None
        self.number = said[1]

    def __getattr__(self, name: str) -> str:
        """Slurm's record of the job: JobState, Restarts, ExitCode."""
        record = self.cluster.job(self.number)
        assert name in record, f"Slurm has no {name} of job {self.number}:\n{self.log()}"
        return record[name]

    @property
    def steps(self) -> list[int]:
        if not (self.out / "ledger.jsonl").exists():
            return []
        return [entry["step"] for entry in self.trainer.lines("ledger.jsonl")]

    @property
    def events(self) -> list[str]:
        return [entry["event"] for entry in self.trainer.lines("events.jsonl")]

    @property
    def saved(self) -> list[int]:
        return [store.parse_step(path) for path in store.committed(self.out / "checkpoints")]

    def noted_save(self) -> bool:
        """Return whether rank 0 has told the batch script of a checkpoint."""
        note = self.out / "logs" / SLURM_NOTE.format(job=self.number)
        return note.exists() and note.read_text().startswith("saved")

    def log(self) -> str:
        return (self.out / "logs" / f"slurm-{self.number}.out").read_text()

    def wait(self, condition: Callable[[], bool], seconds: float = 1200) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, (vars(self), self.log())
            time.sleep(0.2)

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: len(self.steps) > step)

    def notify(self) -> None:
        """Send the notice, as Slurm does before the time limit: to the steps, not the script."""
        self.cluster.ask("scancel", "--signal=USR1", self.number)

    def wait_for_the_end(self) -> None:
        self.wait(lambda: self.JobState not in ("RUNNING", "PENDING", "COMPLETING"))


def test_a_job_requeues_itself_until_the_plans_end(trainer: Any, cluster: Cluster) -> None:
    job = BatchJob(trainer, cluster, "synthetic.steps=300", "checkpoints.every=1000")
    for turn in range(3):
        job.wait_for_step((job.saved or [0])[-1] + 5)
        job.notify()
        job.wait(lambda turn=turn: job.Restarts == str(turn + 1))
    job.wait_for_the_end()
    assert (job.JobState, job.Restarts, job.ExitCode) == ("COMPLETED", "3", "0:0"), job.log()
    assert job.steps == list(range(300))
    ends = [event for event in job.events if event in ("start", "resume", "stop", "finish")]
    assert ends == ["start", *["stop", "resume"] * 3, "finish"]


def test_a_cancelled_job_stays_cancelled(trainer: Any, cluster: Cluster) -> None:
    """Its ranks receive SIGTERM, save and exit with 85."""
    job = BatchJob(trainer, cluster, "synthetic.steps=1000000", "checkpoints.every=10")
    job.wait(lambda: bool(job.saved))
    cluster.ask("scancel", job.number)
    job.wait_for_the_end()
    assert (job.JobState, job.Restarts) == ("CANCELLED", "0"), job.log()
    assert job.events[-1] == "stop" and job.saved[-1] == len(job.steps)


def test_a_job_that_gives_way_to_another_is_requeued(trainer: Any, cluster: Cluster) -> None:
    """`PreemptMode=CANCEL`: Slurm itself would not start it again."""
    job = BatchJob(trainer, cluster, "synthetic.steps=1000000", "checkpoints.every=10")
    job.wait(lambda: bool(job.saved))
    cluster.ask("sbatch", "-p", "urgent", "-N", "2", "-o", "/dev/null", "--wrap", "sleep 1")
    job.wait(lambda: "resume" in job.events)
    cluster.ask("scancel", job.number)
    job.wait_for_the_end()
    assert (job.JobState, job.Restarts) == ("CANCELLED", "1"), job.log()
    assert job.steps == list(range(len(job.steps)))


def test_a_job_survives_the_failure_of_a_node(trainer: Any, cluster: Cluster) -> None:
    job = BatchJob(trainer, cluster, "synthetic.steps=1000000", "checkpoints.every=10")
    job.wait(lambda: bool(job.saved))
    cluster.ask("scontrol", "update", "NodeName=127.0.0.2", "State=DOWN", "Reason=test")
    job.wait(lambda: job.Restarts == "1")
    cluster.ask("scontrol", "update", "NodeName=127.0.0.2", "State=RESUME")
    job.wait(lambda: job.events.count("resume") == 1)
    job.wait_for_step(job.saved[-1] + 5)
    assert job.steps == list(range(len(job.steps)))
    cluster.ask("scancel", job.number)
    job.wait_for_the_end()


def test_a_job_that_a_person_stops_is_not_requeued(trainer: Any, cluster: Cluster) -> None:
    job = BatchJob(trainer, cluster, "checkpoints.every=2", "--stop-after", "4")
    job.wait_for_the_end()
    assert (job.JobState, job.Restarts, job.ExitCode) == ("FAILED", "0", "85:0"), job.log()
    assert job.events[-1] == "stop" and job.saved[-1] == 4


def test_a_job_writes_its_log_into_a_folder_with_an_odd_name(
    trainer: Any, cluster: Cluster
) -> None:
    trainer.out = trainer.folder / "a b#1%j's"
    job = BatchJob(trainer, cluster, "--stop-after", "2")
    job.wait_for_the_end()
    assert job.saved == [2] and "saved at step 2" in job.log()


class SlowDisk:
    """A disk of the job, whose speed the test changes while the job runs."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder = folder
        self.take(seconds)
        (folder / "sitecustomize.py").write_text(SLOW_DISK)
        self.setup = f"export PYTHONPATH={folder}:$PYTHONPATH"

    def take(self, seconds: float) -> None:
        """Let each `fsync` take these seconds from now on."""
        new = self.folder / "new"
        new.write_text(str(seconds))
        new.replace(self.folder / "seconds")


def test_a_notice_during_a_save_requeues(trainer: Any, cluster: Cluster, tmp_path: Path) -> None:
    words = ["synthetic.steps=1000000", "checkpoints.every=1"]
    job = BatchJob(trainer, cluster, *words, setup=SlowDisk(tmp_path, seconds=2).setup)
    job.wait(lambda: bool(list((job.out / "checkpoints").glob(".*.tmp"))))
    job.notify()
    job.wait(lambda: job.Restarts == "1")
    job.wait(lambda: "resume" in job.events)
    cluster.ask("scancel", job.number)
    job.wait_for_the_end()
    assert job.steps == list(range(len(job.steps)))


def test_a_time_limit_during_a_save_requeues(
    trainer: Any, cluster: Cluster, tmp_path: Path
) -> None:
    """The save does not end in time: Slurm kills it. The next start begins at the checkpoint
    before."""
    disk = SlowDisk(tmp_path, seconds=0)
    limit = ["slurm.time=00:01:00", "slurm.notice=5"]
    words = ["synthetic.steps=1000000", "checkpoints.every=1"]
    job = BatchJob(trainer, cluster, *limit, *words, setup=disk.setup)
    job.wait(job.noted_save)  # the checkpoint is visible before its folder's last `fsync`
    disk.take(3600)
    job.wait(lambda: job.Restarts == "1")
    assert "DUE TO TIME LIMIT" in job.log()
    saved = job.saved[-1]
    disk.take(0)
    job.wait(lambda: "resume" in job.events and job.saved[-1] > saved)
    cluster.ask("scancel", job.number)
    job.wait_for_the_end()
    assert job.steps == list(range(len(job.steps)))
