from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.console.errors import LayoutError, RunError
from headrace.planner.tune.trial import died_of_memory
from headrace.trainer.cluster.end import PlainEnd
from headrace.trainer.cluster.ranks import INTERRUPTED, threads_per_rank
from headrace.trainer.launch import template
from headrace.trainer.launch.launcher import Launcher

Make = Callable[..., Launcher]


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Return a function that makes a launcher of a script. Its ranks are new processes, because
    pytest has threads; test_template.py has ranks that are forks."""
    monkeypatch.setattr("threading.active_count", lambda: 2)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with template.running_template("scripted", [], PlainEnd()) as forks:

        def make(script: str, processes: int = 2, **seconds: float) -> Launcher:
            start = "import os, sys, time, signal\nrank = int(os.environ['RANK'])\n"
            (tmp_path / "scripted.py").write_text(start + script)
            return Launcher(forks, [], processes, threads=1, logs=tmp_path, **seconds)

        yield make


def test_ranks_receive_their_environment(launcher: Make, tmp_path: Path) -> None:
    script = f"open(r'{tmp_path}/%d' % rank, 'w').write(os.environ['WORLD_SIZE'])"
    assert launcher(script, processes=3).run() == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["3", "3", "3"]


def test_files_of_the_users_folder_are_not_imported(
    launcher: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "http.py").write_text("raise SystemExit(3)")
    monkeypatch.chdir(tmp_path / "here")
    assert launcher("import http.client", processes=1).run() == 0


def test_the_first_failing_ranks_error_is_raised(launcher: Make) -> None:
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
        launcher(script).run()
    assert caught.value.hint == "give up"


def test_a_bug_is_reported_with_rank_and_traceback(launcher: Make) -> None:
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
        launcher(script).run()
    assert "scripted.py" in str(caught.value)


@pytest.mark.parametrize(
    ("number", "hint"), [(signal.SIGKILL, "ran out of memory"), (signal.SIGABRT, "rank-1.log")]
)
def test_a_killed_rank_ends_the_others(number: signal.Signals, hint: str, launcher: Make) -> None:
    """Linux kills a process that takes too much memory by SIGKILL alone."""
    script = f"os.kill(os.getpid(), {int(number)}) if rank else time.sleep(1000)"
    job = launcher(script, grace_seconds=0.3)
    with pytest.raises(RunError, match=f"rank 1 was killed by {number.name}") as caught:
        job.run()
    assert caught.value.hint is not None and hint in caught.value.hint
    assert died_of_memory(f"step 3\nerror: {caught.value}\n") == (number == signal.SIGKILL)
    assert all(child.poll() is not None for child in job.children)


def test_a_crashed_rank_shows_its_stacks(launcher: Make, tmp_path: Path) -> None:
    script = """
import ctypes
from headrace.trainer.cluster.ranks import Watched
watched = Watched()
def crashes_here():
    ctypes.string_at(0)
crashes_here() if rank else time.sleep(1000)
"""
    with pytest.raises(RunError, match="rank 1 was killed by SIGSEGV") as caught:
        launcher(script, grace_seconds=0.3).run()
    stacks = (tmp_path / "rank-1.log").read_text()
    assert "Segmentation fault" in stacks and "in crashes_here" in stacks
    assert caught.value.where is not None and stacks.rstrip() in caught.value.where


def test_a_request_to_stop_reaches_every_rank(launcher: Make, tmp_path: Path) -> None:
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
    assert launcher(script).run() == INTERRUPTED


def test_a_hanging_run_reports_stacks(launcher: Make) -> None:
    script = """
from headrace.trainer.cluster.ranks import Watched
watched = Watched()
watched.beat("step 7")
def stuck_here():
    time.sleep(1000)
stuck_here()
"""
    with pytest.raises(RunError, match="no rank has made progress") as caught:
        launcher(script, stall_seconds=2.0).run()
    text = str(caught.value)
    assert "rank 1, step 7" in text and "stuck_here" in text
    assert "collective" not in caught.value.message


def test_a_rank_that_hangs_outside_of_collectives_is_named(launcher: Make) -> None:
    """The others wait for it. In the test before this one all ranks sleep, and none is named."""
    script = """
from headrace.trainer.cluster.ranks import Watched
watched = Watched()
watched.beat("step 7")
collective = "def all_reduce(): time.sleep(1000)"
if rank != 1:
    exec(compile(collective, "/lib/torch/distributed/distributed_c10d.py", "exec"))
    all_reduce()
time.sleep(1000)
"""
    named = "progress for 2 seconds; rank 1 is in no collective, and the others wait$"
    with pytest.raises(RunError) as caught:
        launcher(script, processes=3, stall_seconds=2.0).run()
    assert re.search(named, caught.value.message)


@pytest.mark.parametrize("wrong", [-1e5, 1e5])
def test_a_clock_that_is_set_ends_no_run_and_hides_no_hang(
    launcher: Make, tmp_path: Path, wrong: float
) -> None:
    """Beats are compared with each other, not with the clock."""
    watching = launcher("", processes=1, stall_seconds=0.4, stack_seconds=0.1)
    beat = tmp_path / "beat.0"
    for step in range(2):
        beat.write_text(f"step {step}")
        os.utime(beat, (time.time() + wrong + step,) * 2)
        watching._check_progress(tmp_path)
    time.sleep(0.5)
    with pytest.raises(RunError, match="no rank has made progress"):
        watching._check_progress(tmp_path)


def test_a_hanging_start_reports_stacks(launcher: Make) -> None:
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
        launcher(script, stall_seconds=2.0).run()
    text = str(caught.value)
    assert "rank 0, start:" in text and "rank 1, joining the others:" in text and "joins" in text


def test_a_stopped_rank_is_named(launcher: Make) -> None:
    script = """
from headrace.trainer.cluster.ranks import Watched
watched = Watched()
watched.beat("step 3")
if rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(1000)
"""
    job = launcher(script, stall_seconds=2.0, grace_seconds=0.3, stack_seconds=3.0)
    with pytest.raises(RunError, match=r"rank 1 did not write a stack") as caught:
        job.run()
    assert "rank 1, step 3:\n  (no answer)" in str(caught.value)
    assert all(child.poll() is not None for child in job.children)


def test_threads_fill_the_machine() -> None:
    assert threads_per_rank(2, 8) == 4
    assert threads_per_rank(16, 8) == 1


def test_a_reported_error_outweighs_the_exit_signal(launcher: Make) -> None:
    """A library may abort while the interpreter exits."""
    script = """
from headrace.trainer.cluster.ranks import Watched
from headrace.console.errors import LayoutError
Watched().fail(LayoutError("rank 0 cannot"))
os.abort()
"""
    with pytest.raises(LayoutError, match="rank 0 cannot"):
        launcher(script, processes=1).run()


def test_a_signal_before_a_rank_starts_reaches_it(
    launcher: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = launcher("time.sleep(1000)", processes=1)
    start = job._start

    def interrupted(rank: int, *more: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        start(rank, *more)

    monkeypatch.setattr(job, "_start", interrupted)
    assert job.run() == INTERRUPTED


HANGS = """
import os, time
from headrace.trainer.cluster import ranks
ranks.LAST_WORDS = 0.1
watched = ranks.Watched()
def stuck_here():
    time.sleep(1000)
with watched.watching_itself(2.0, "rank 3 (stage 1)"):
    for moment in range(30):  # longer than the limit
        watched.beat("step 3")
        time.sleep(0.1)
    print("progress", flush=True)
    stuck_here()
"""


def test_a_crashed_rank_of_another_launcher_writes_its_stacks() -> None:
    script = """
import ctypes
from headrace.trainer.cluster.ranks import Watched
def crashes_here():
    ctypes.string_at(0)
with Watched().watching_itself(0.0, "rank 3"):
    crashes_here()
"""
    environment = {**os.environ, "RANK": "3", "WORLD_SIZE": "4"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == -signal.SIGSEGV
    assert "Segmentation fault" in done.stderr and "in crashes_here" in done.stderr


def test_a_rank_of_another_launcher_ends_itself_if_it_hangs() -> None:
    environment = {**os.environ, "RANK": "3", "WORLD_SIZE": "4"}
    done = subprocess.run(
        [sys.executable, "-c", HANGS], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert done.stdout == "progress\n"
    said = (
        "rank 3 (stage 1) has made no progress for 2 seconds (step 3); it waits for no other rank"
    )
    assert said in done.stderr
    assert "stuck_here" in done.stderr and "watch.stall_seconds" in done.stderr
