"""The command from outside: starts, restarts, resumes, rejected starts."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from support.ranks import forked

from headrace.trainer.checkpoints import store


def wait_for(condition: Any, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def steps_taken(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def leave_as_if_killed_at_the_end(run: Path) -> None:
    """Kill the run after its last step, before it prunes, prints and writes the report."""
    events = (run / "events.jsonl").read_text().splitlines(keepends=True)
    (run / "events.jsonl").write_text("".join(events[:-1]))
    (run / "report.html").unlink()
    (run / ".report.html.01234567.tmp").touch()
    checkpoints = run / "checkpoints"
    shutil.copytree(checkpoints / store.name(6), checkpoints / store.name(1))
    (checkpoints / f".{store.name(1)}.deleted.tmp" / store.TENSORS).mkdir(parents=True)


def test_an_interrupted_run_equals_an_undisturbed_one(trainer: Any, whole: Any) -> None:
    """Two ranks; stopped half-way by --stop-after; `resume` needs the folder alone."""
    stderr = trainer.run("--processes", "2", "--stop-after", "3", code=85)
    assert f"saved at step 3 of 6 (exit code 85); to go on: trainer resume {trainer.out}" in stderr
    command = [sys.executable, "-m", "headrace.trainer.cli", "resume", str(trainer.out), "--json"]
    done = forked.run(command)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["finished"], "nothing else is needed"
    assert trainer.lines("ledger.jsonl") == trainer.lines("ledger.jsonl", whole(2))
    assert trainer.losses() == trainer.losses(whole(2)), "equal to the bit"
    events = [event["event"] for event in trainer.lines("events.jsonl")]
    told = ["start", "first step", "stop", "resume", "first step", "finish"]
    assert [name for name in events if name not in ("checkpoint", "memory")] == told
    assert "the first step ended" in stderr
    last = trainer.lines("events.jsonl")[-1]
    held = files(trainer.out)
    leave_as_if_killed_at_the_end(trainer.out)
    assert "has already taken all of its 6 steps" in trainer.run("--processes", "2")
    assert files(trainer.out) == held
    assert trainer.lines("events.jsonl")[-1] == {**last, "time": ANY}
    assert '"status finished"' in (trainer.out / "report.html").read_text()


@pytest.mark.slow
def test_another_layout_resumes_with_the_same_rows(trainer: Any, whole: Any) -> None:
    trainer.run("--processes", "2", "--stop-after", "4", code=85)
    trainer.run("engine.kind=deepspeed", "engine.zero=2")
    assert trainer.lines("ledger.jsonl") == trainer.lines("ledger.jsonl", whole(1))
    far = max(abs(a - b) for a, b in zip(trainer.losses(), trainer.losses(whole(1)), strict=True))
    assert far < 2e-6


@pytest.mark.slow
def test_a_killed_run_loses_at_most_the_steps_since_its_checkpoint(
    trainer: Any, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    more = ["synthetic.steps=24"]
    trainer.run(*more, out=whole)
    process = trainer.start(*more)
    wait_for(lambda: steps_taken(trainer.out / "metrics.jsonl") >= 5)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    taken = steps_taken(trainer.out / "ledger.jsonl")
    saved = [store.parse_step(path) for path in store.committed(trainer.out / "checkpoints")]
    assert saved and taken - saved[-1] <= 6
    trainer.run(*more)
    assert trainer.lines("ledger.jsonl") == trainer.lines("ledger.jsonl", whole)
    assert trainer.losses() == trainer.losses(whole)
    assert not list((trainer.out / "checkpoints").glob(".*"))


def asked_to_make_room(trainer: Any, process: Any, number: signal.Signals) -> None:
    wait_for(lambda: steps_taken(trainer.out / "metrics.jsonl") >= 3)
    process.send_signal(number)
    assert process.wait(timeout=300) == 85
    saved = store.committed(trainer.out / "checkpoints")[-1]
    assert store.parse_step(saved) == steps_taken(trainer.out / "ledger.jsonl")


NOTES_TORCH = """
import os, sys
class Finder:
    def find_spec(name, path=None, target=None):
        if name == "torch":
            with open(os.environ["NOTED"], "a") as file:
                file.write(f"{os.getpid()}\\n")
sys.meta_path.insert(0, Finder)
"""


def test_sigterm_saves_and_stops(
    trainer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command imports torch, and its ranks do not."""
    (tmp_path / "sitecustomize.py").write_text(NOTES_TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("NOTED", str(tmp_path / "noted"))
    endless = ["synthetic.steps=1000000", "checkpoints.every=100000", "--processes", "2"]
    process = trainer.start(*endless)
    asked_to_make_room(trainer, process, signal.SIGTERM)
    assert (tmp_path / "noted").read_text() == f"{process.pid}\n"


def handles(process: subprocess.Popen[bytes], number: signal.Signals) -> bool:
    """True if the process has a handler for a signal."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_sigterm_in_the_first_seconds_exits_with_85(trainer: Any) -> None:
    process = trainer.start()
    wait_for(lambda: handles(process, signal.SIGTERM))
    assert not trainer.out.exists(), "nothing has started yet"
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=300) == 85
    log = (trainer.folder / "started.log").read_text()
    assert "stopped before the first step; the same command starts it again" in log
    assert not trainer.out.exists()


@pytest.mark.long
def test_a_resume_detects_the_same_spikes(trainer: Any, tmp_path: Path) -> None:
    """With a bound of 0 every second loss is a spike, and the weights are rolled back."""
    more = ["synthetic.steps=16", "checkpoints.every=5", "watch.spike=rollback"]
    more += ["watch.spike_bound=0", "watch.spike_window=8", "watch.rollbacks=9"]
    whole = tmp_path / "whole"
    trainer.run(*more, out=whole)
    ledger = trainer.lines("ledger.jsonl", whole)
    left_out = [entry for entry in ledger if entry.get("skipped")]
    assert left_out and all(entry["why"] == "spike" for entry in left_out)
    assert all(
        entry["back_to"] <= entry["step"] and entry["back_to"] % 5 == 0 for entry in left_out
    )
    trainer.run(*more, "--stop-after", "13", code=85)
    trainer.run(*more)
    assert trainer.lines("ledger.jsonl") == ledger
    assert trainer.losses() == trainer.losses(whole)
    told = [event for event in trainer.lines("events.jsonl") if event["event"] == "spike"]
    assert told and "rows" in told[0]["where"]
    assert "Skipped steps" in (trainer.out / "report.html").read_text()


@pytest.mark.slow
def test_two_runs_do_not_share_a_folder(trainer: Any) -> None:
    more = ["synthetic.steps=1000000", "checkpoints.every=100000"]
    process = trainer.start(*more)
    wait_for(lambda: (trainer.out / "run.yaml").exists())
    stderr = trainer.run(*more, code=1)
    assert f"is in use by process {process.pid}" in stderr
    asked_to_make_room(trainer, process, signal.SIGUSR1)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_skipped_only_with_fallback(trainer: Any) -> None:
    trainer.run("--stop-after", "5", code=85)
    newest = store.committed(trainer.out / "checkpoints")[-1]
    (place,) = (newest / "tensors").glob("*.distcp")
    data = bytearray(place.read_bytes())
    data[len(data) // 2] ^= 1
    place.write_bytes(data)
    stderr = trainer.run(code=1)
    assert str(newest) in stderr and place.name in stderr and "--fallback" in stderr
    assert steps_taken(trainer.out / "ledger.jsonl") == 5
    trainer.run("--fallback")
    assert [entry["step"] for entry in trainer.lines("ledger.jsonl")] == list(range(6))
    assert (trainer.out / "ledger.after-4.jsonl").exists()
    assert (trainer.out / "checkpoints" / f"abandoned-{newest.name}").exists()


@pytest.mark.long
def test_a_lost_ledger_ends_the_resume_unless_a_new_one_is_asked_for(trainer: Any) -> None:
    trainer.run("--stop-after", "3", code=85)
    (trainer.out / "ledger.jsonl").unlink()
    stderr = trainer.run(code=1)
    assert "ledger.jsonl is missing" in stderr and "--new-ledger" in stderr
    trainer.run("--new-ledger")
    assert [entry["step"] for entry in trainer.lines("ledger.jsonl")] == [2, 3, 4, 5]


@pytest.mark.slow
def test_weights_of_another_run_initialise_a_new_one(trainer: Any, whole: Any) -> None:
    parent = whole(1)
    trainer.run("--stop-after", "1", f"init_from.path={parent}", code=85)
    start = trainer.lines("events.jsonl")[0]
    assert start["checkpoint"] == str(parent / "checkpoints" / store.name(6))
    assert trainer.lines("ledger.jsonl") == trainer.lines("ledger.jsonl", parent)[:1]
    assert trainer.losses()[0] != trainer.losses(parent)[0], "the same rows, and other weights"


@pytest.mark.slow
def test_the_command_joins_torchrun(trainer: Any, whole: Any) -> None:
    rank = trainer.command()[1:]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    done = subprocess.run(
        [*torchrun, *rank], capture_output=True, text=True, timeout=580, check=False
    )
    assert done.returncode == 0, done.stderr
    assert trainer.losses() == trainer.losses(whole(2))
    events = trainer.lines("events.jsonl")
    again, second = trainer.join([], [])
    assert again[0] == second[0] == 0, again
    assert "has already taken all of its 6 steps" in again[1]
    assert trainer.lines("events.jsonl") == events


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_run_killed_ten_times_equals_an_undisturbed_one(trainer: Any, tmp_path: Path) -> None:
    import random

    whole = tmp_path / "whole"
    more = ["--processes", "2", "synthetic.steps=150", "checkpoints.every=3"]
    trainer.run(*more, out=whole)
    generator = random.Random(5)
    for kill in range(10):
        process = trainer.start(*more)
        goal = (kill + 1) * 12
        wait_for(lambda goal=goal: steps_taken(trainer.out / "metrics.jsonl") >= goal, 600)
        time.sleep(generator.random() * 0.2)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    trainer.run(*more)
    assert trainer.lines("ledger.jsonl") == trainer.lines("ledger.jsonl", whole)
    assert trainer.losses() == trainer.losses(whole)
