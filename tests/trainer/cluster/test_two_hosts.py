"""One run over two machines, which network namespaces stand in for; one of them is lost."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ranks import hosts
from support.ranks.hosts import PORT, Host

from headrace.trainer.checkpoints import store

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not hosts.can_make_hosts(), reason="network namespaces need root"),
]
ENDLESS = ["synthetic.steps=100000", "checkpoints.every=5", "watch.stall_seconds=20"]


@pytest.fixture
def machines() -> Iterator[tuple[Host, Host]]:
    with hosts.two_hosts() as result:
        yield result


Start = Callable[..., subprocess.Popen[bytes]]


def by_torchrun(trainer: Any, host: Host, *words: str) -> subprocess.Popen[bytes]:
    """Start torchrun on a machine, with one rank."""
    python, *command = trainer.command(*words)
    place = ["--nnodes", "2", "--nproc-per-node", "1", "--node-rank", str(host.number)]
    meeting = ["--master-addr", "machine0", "--master-port", str(PORT)]
    torchrun = [python, "-m", "torch.distributed.run", *place, *meeting, *command]
    return host.start(torchrun, log_of(trainer, host))


def by_environment(trainer: Any, host: Host, *words: str) -> subprocess.Popen[bytes]:
    """Start one rank on a machine, as srun or a Kubernetes job does."""
    rank = {"RANK": str(host.number), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    meeting = {"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "machine0", "MASTER_PORT": str(PORT)}
    return host.start(trainer.command(*words), log_of(trainer, host), rank | meeting)


def log_of(trainer: Any, host: Host) -> Path:
    return Path(trainer.folder, f"{host.name}.log")


def steps_taken(run: Path) -> int:
    metrics = run / "metrics.jsonl"
    return metrics.read_text().count("\n") if metrics.exists() else 0


def ledger(run: Path) -> bytes:
    return (run / "ledger.jsonl").read_bytes()


def lose_a_machine(
    trainer: Any, machines: tuple[Host, Host], start: Start, lose: Callable[[Host], None], lost: int
) -> list[str]:
    """Start a run over both machines, lose one, and return what each machine says in the end."""
    started = [start(trainer, host, *ENDLESS) for host in machines]
    while steps_taken(trainer.out) < 12:
        assert all(process.poll() is None for process in started)
        time.sleep(0.05)
    lose(machines[lost])
    codes = [process.wait(300) for process in started]
    assert all(codes), codes
    return [log_of(trainer, host).read_text() for host in machines]


def resume_elsewhere(trainer: Any, machines: tuple[Host, Host], start: Start) -> None:
    """Resume on one machine with one rank, then on both again. All rows, and the losses up to
    rounding, are those of a run that nothing disturbed."""
    saved = store.parse_step(store.committed(trainer.out / "checkpoints")[-1])
    assert saved >= 5
    trainer.run(*ENDLESS, "--stop-after", str(saved + 3), code=85)
    end = [*ENDLESS, "--stop-after", str(saved + 6)]
    for process in [start(trainer, host, *end) for host in machines]:
        process.wait(300)
    undisturbed = trainer.folder / "undisturbed"
    trainer.run(*end, out=undisturbed, code=85)
    assert len(trainer.losses()) == saved + 6
    assert ledger(trainer.out) == ledger(undisturbed)
    pairs = zip(trainer.losses(), trainer.losses(undisturbed), strict=True)
    assert max(abs(loss - expected_loss) for loss, expected_loss in pairs) < 5e-6
    starts = [event for event in trainer.lines("events.jsonl") if "layout" in event]
    assert [event["layout"]["dp"] for event in starts] == [2, 1, 2]


@pytest.mark.parametrize(("start", "lost"), [(by_torchrun, 1), (by_environment, 0)])
def test_a_killed_machine_is_named_by_the_other(
    trainer: Any, machines: tuple[Host, Host], start: Start, lost: int
) -> None:
    logs = lose_a_machine(trainer, machines, start, Host.kill, lost)
    rank, address = 1 - lost, machines[lost].address
    said = f"error: rank {rank} lost its connection to rank {lost} at {address}: that rank has"
    assert said in logs[rank]
    assert "Traceback" not in logs[rank].partition(said)[0]
    resume_elsewhere(trainer, machines, start)


@pytest.mark.parametrize("start", [by_torchrun, by_environment])
def test_both_sides_of_a_cut_link_end(
    trainer: Any, machines: tuple[Host, Host], start: Start
) -> None:
    """Nothing tells them that the link is down: each ends when it has made no progress for long."""
    logs = lose_a_machine(trainer, machines, start, Host.cut, 1)
    for rank, log in enumerate(logs):
        assert f"error: rank {rank} has made no progress for 20 seconds (step " in log
    machines[1].mend()
    resume_elsewhere(trainer, machines, start)
