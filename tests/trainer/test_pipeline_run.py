"""The command with stages of a pipeline: ledger, resumes, skipped steps, lost and stuck ranks."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.trainer.checkpoints import store

PIPED = ("--processes", "2", "layout.pp=2", "micro_batch_tokens=16")


def wait_for(condition: Any, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ledger(run: Path) -> bytes:
    return (run / "ledger.jsonl").read_bytes()


def are_near(losses: list[float], expected: list[float]) -> bool:
    return all(abs(a - b) < 2e-6 for a, b in zip(losses, expected, strict=True))


@pytest.mark.slow
def test_a_pipeline_has_the_ledger_of_one_rank_and_resumes_on_one(trainer: Any, whole: Any) -> None:
    stderr = trainer.run(*PIPED, "--stop-after", "3", code=85)
    assert "fewer than 2 for each of the 2 stages" not in stderr
    trainer.run()
    assert ledger(trainer.out) == ledger(whole(1))
    assert are_near(trainer.losses(), trainer.losses(whole(1)))
    layouts = [e["layout"] for e in trainer.lines("events.jsonl") if "layout" in e]
    assert [layout["pp"] for layout in layouts] == [2, 1]


@pytest.mark.long
def test_the_same_stages_resume_to_the_bit(trainer: Any, whole: Any, tmp_path: Path) -> None:
    """Under ZeRO-1; another schedule takes over in the end."""
    words = (*PIPED, "engine.kind=deepspeed")
    trainer.run(*words, out=tmp_path / "undisturbed")
    trainer.run(*words, "--stop-after", "3", code=85)
    trainer.run(*words, "--stop-after", "5", code=85)
    assert trainer.losses() == trainer.losses(tmp_path / "undisturbed")[:5]
    trainer.run(*words, "layout.schedule=interleaved", "layout.chunks=2")
    assert ledger(trainer.out) == ledger(whole(1))
    assert are_near(trainer.losses(), trainer.losses(whole(1)))


@pytest.mark.long
def test_every_stage_skips_the_same_spikes(trainer: Any, tmp_path: Path) -> None:
    """With a bound of 0 every second loss is a spike, and the weights are rolled back."""
    more = ["synthetic.steps=12", "checkpoints.every=5", "watch.spike=rollback"]
    more += ["watch.spike_bound=0", "watch.spike_window=8", "watch.rollbacks=9"]
    alone = tmp_path / "alone"
    trainer.run(*more, out=alone)
    trainer.run(*more, *PIPED)
    skipped = [entry for entry in trainer.lines("ledger.jsonl") if entry.get("skipped")]
    assert skipped and all(entry["why"] == "spike" for entry in skipped)
    assert ledger(trainer.out) == ledger(alone)
    assert are_near(trainer.losses(), trainer.losses(alone))


def ranks_of(launcher: int) -> list[int]:
    """Return the processes of the ranks, by rank."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    numbers = {}
    for child in children:
        words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        [rank] = [word for word in words if word.startswith(b"RANK=")]
        numbers[int(rank[5:])] = int(child)
    return [numbers[rank] for rank in sorted(numbers)]


@pytest.mark.long
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("sent", "message"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "did not write a stack")],
)
def test_a_lost_stage_is_named_and_the_run_resumes(
    trainer: Any, tmp_path: Path, rank: int, sent: signal.Signals, message: str
) -> None:
    more = [*PIPED, "synthetic.steps=100000", "checkpoints.every=5"]
    stall = ["watch.stall_seconds=20"] * (sent == signal.SIGSTOP)
    process = trainer.start(*more, *stall)
    metrics = trainer.out / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 7)
    os.kill(ranks_of(process.pid)[rank], sent)
    assert process.wait(timeout=300) == 1
    log = (trainer.folder / "started.log").read_text()
    assert f"rank {rank} (stage {rank}) {message}" in log
    assert f"rank {1 - rank} (stage {1 - rank}) {message}" not in log
    saved = store.parse_step(store.committed(trainer.out / "checkpoints")[-1])
    end = ["--stop-after", str(saved + 1)]
    trainer.run(*more, *end, code=85)
    trainer.run(*more, *end, out=tmp_path / "undisturbed", code=85)
    assert ledger(trainer.out) == ledger(tmp_path / "undisturbed")
    assert trainer.losses() == trainer.losses(tmp_path / "undisturbed"), "equal to the bit"


@pytest.mark.long
def test_sigterm_saves_every_stage(trainer: Any, tmp_path: Path) -> None:
    more = [*PIPED, "synthetic.steps=100000", "checkpoints.every=100000"]
    process = trainer.start(*more)
    metrics = trainer.out / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") >= 3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=120) == 85
    saved = store.parse_step(store.committed(trainer.out / "checkpoints")[-1])
    assert saved == len(trainer.lines("ledger.jsonl"))
    end = ["--stop-after", str(saved + 2)]
    trainer.run(*more, *end, code=85)
    trainer.run(*more, *end, out=tmp_path / "undisturbed", code=85)
    assert ledger(trainer.out) == ledger(tmp_path / "undisturbed")
    assert trainer.losses() == trainer.losses(tmp_path / "undisturbed"), "equal to the bit"
