from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from headrace.console.errors import LayoutError, RunError
from headrace.trainer.cluster.ranks import INTERRUPTED, threads_per_rank
from headrace.trainer.launch import launcher as launch
from headrace.trainer.launch.launcher import Launcher


def launcher(tmp_path: Path, script: str, processes: int = 2, stall: float = 0) -> Launcher:
    file = tmp_path / "rank.py"
    file.write_text("import os, sys, time, signal\nrank = int(os.environ['RANK'])\n" + script)
    command = [sys.executable, str(file)]
    return Launcher(command, processes, threads=1, logs=tmp_path, stall_seconds=stall)


def test_ranks_receive_their_environment(tmp_path: Path) -> None:
    script = f"open(r'{tmp_path}/%d' % rank, 'w').write(os.environ['WORLD_SIZE'])"
    assert launcher(tmp_path, script, processes=3).run() == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["3", "3", "3"]


def test_the_first_failing_ranks_error_is_raised(tmp_path: Path) -> None:
    script = """
from headrace.trainer.cluster.ranks import Watched
from headrace.console.errors import LayoutError
watched = Watched()
def wait_for(other):
    while not (watched.folder / f"failure.{other}").exists():
        time.sleep(0.01)
if rank == 1:
    watched.fail(LayoutError("rank 1 cannot", hint="give up"))
    wait_for(0)
    time.sleep(0.5)  # it ends after the one that follows it
else:
    wait_for(1)
    watched.fail(RuntimeError("connection closed by peer"))
sys.exit(1)
"""
    with pytest.raises(LayoutError, match="rank 1 cannot") as caught:
        launcher(tmp_path, script).run()
    assert caught.value.hint == "give up"


def test_a_bug_is_reported_with_rank_and_traceback(tmp_path: Path) -> None:
    script = """
from headrace.trainer.cluster.ranks import Watched
watched = Watched()
try:
    if rank == 1: raise KeyError("unexpected")
except KeyError as error:
    watched.fail(error)
    sys.exit(1)
"""
    with pytest.raises(RunError, match="rank 1 stopped: KeyError: 'unexpected'") as caught:
        launcher(tmp_path, script).run()
    assert "rank.py" in str(caught.value)


def test_a_killed_rank_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "os.kill(os.getpid(), 9) if rank else time.sleep(1000)"
    job = launcher(tmp_path, script)
    monkeypatch.setattr(launch, "GRACE", 0.3)
    with pytest.raises(RunError, match="rank 1 was killed by SIGKILL"):
        job.run()
    assert all(child.poll() is not None for child in job.children)


def test_a_request_to_stop_reaches_every_rank(tmp_path: Path) -> None:
    script = f"""
def stop(*_):
    sys.exit({INTERRUPTED})
signal.signal(signal.SIGTERM, stop)
open(r'{tmp_path}/ready%d' % rank, 'w').close()
time.sleep(1000)
"""

    def ask() -> None:
        while len(list(tmp_path.glob("ready*"))) < 2:
            time.sleep(0.05)
        signal.raise_signal(signal.SIGTERM)

    threading.Thread(target=ask).start()
    assert launcher(tmp_path, script).run() == INTERRUPTED


def test_a_hanging_run_reports_stacks(tmp_path: Path) -> None:
    script = """
from headrace.trainer.cluster.ranks import Watched
watched = Watched()
watched.beat("step 7")
def stuck_here():
    time.sleep(1000)
stuck_here()
"""
    with pytest.raises(RunError, match="no rank has made progress") as caught:
        launcher(tmp_path, script, stall=2.0).run()
    text = str(caught.value)
    assert "rank 1, step 7" in text and "stuck_here" in text


def test_a_hanging_start_reports_stacks(tmp_path: Path) -> None:
    """No rank has reached a step, and one is further than the other."""
    script = """
from headrace.trainer.cluster.ranks import Watched
watched = Watched()
def joins():
    time.sleep(1000)
if rank == 1:
    watched.beat("joining the others")
joins()
"""
    with pytest.raises(RunError, match="no rank has made progress") as caught:
        launcher(tmp_path, script, stall=2.0).run()
    text = str(caught.value)
    assert "rank 0, start:" in text and "rank 1, joining the others:" in text and "joins" in text


def test_a_stopped_rank_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = """
from headrace.trainer.cluster.ranks import Watched
watched = Watched()
watched.beat("step 3")
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1000)
"""
    job = launcher(tmp_path, script, stall=2.0)
    monkeypatch.setattr(launch, "GRACE", 0.3)
    monkeypatch.setattr(launch, "STACK_TIMEOUT", 3.0)
    with pytest.raises(RunError, match=r"rank 1 did not write a stack") as caught:
        job.run()
    assert "rank 1, step 3:\n  (no answer)" in str(caught.value)
    assert all(child.poll() is not None for child in job.children)


def test_threads_fill_the_machine() -> None:
    assert threads_per_rank(2, 8) == 4
    assert threads_per_rank(16, 8) == 1


def test_a_reported_error_outweighs_the_exit_signal(tmp_path: Path) -> None:
    """A library may abort while the interpreter exits."""
    script = """
from headrace.trainer.cluster.ranks import Watched
from headrace.console.errors import LayoutError
Watched().fail(LayoutError("rank 0 cannot"))
os.abort()
"""
    with pytest.raises(LayoutError, match="rank 0 cannot"):
        launcher(tmp_path, script, processes=1).run()
