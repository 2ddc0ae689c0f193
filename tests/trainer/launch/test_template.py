"""Ranks that are forks of a process which has imported what they import.

Each test starts a command of its own, which imports no torch: the module `work` holds `main` of a
rank, and the module `heavy` stands for torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.trainer.cluster.ranks import INTERRUPTED

COMMAND = """
import os, sys, threading, time
from pathlib import Path
from headrace.console.errors import UserError
from headrace.trainer.cluster.end import PlainEnd
from headrace.trainer.launch import template
from headrace.trainer.launch.launcher import Launcher
end = PlainEnd()
BEFORE
with template.running_template("work", ["heavy"], end) as forks:
    Path("template").write_text(str(forks.pid))
    try:
        code = Launcher(forks, ["word"], 2, threads=3, logs=Path("logs")).run()
    except UserError as error:
        sys.exit(f"error: {error}")
end.code = code
sys.exit(code)
"""
HEAVY = """
import atexit, os
with open("imports", "a") as file:
    file.write(f"{os.getpid()}\\n")
def note():
    with open("handlers", "a") as file:
        file.write(f"{os.getpid()}\\n")
atexit.register(note)
"""
START = """
import os, signal, sys, threading, time
import heavy
from pathlib import Path
from headrace.trainer.cluster.ranks import StopRequest, Watched
"""
END = """
if __name__ == "__main__":
    sys.exit(main())
"""
WAITS = """
def main():
    watched, asked = Watched(), StopRequest()
    Path(f"rank-{os.getpid()}").touch()
    while not asked():
        time.sleep(0.01)
    Path(f"saved-{os.getpid()}").touch()
    return 85
"""


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def alive(process: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{process}/status").read_text()
    except OSError:
        return False


class Command:
    """A command whose ranks run `work`. All of its files are in one folder."""

    def __init__(self, folder: Path, work: str, before: str) -> None:
        self.folder = folder
        program = COMMAND.replace("BEFORE", before)
        for name, text in (("work", START + work + END), ("heavy", HEAVY), ("command", program)):
            (folder / f"{name}.py").write_text(text)
        self.process = subprocess.Popen(
            [sys.executable, "command.py"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text().split()

    def wait(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out, err

    def ranks(self) -> list[int]:
        """Wait until both ranks run; return their process ids."""
        wait_for(lambda: len(list(self.folder.glob("rank-*"))) == 2)
        return [int(path.name.removeprefix("rank-")) for path in self.folder.glob("rank-*")]


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Command]:
    def start(work: str, before: str = "") -> Command:
        return Command(tmp_path, work, before)

    return start


REPORTS = """
def write():
    time.sleep(0.3)
    Path(f"thread-{os.getpid()}").touch()
def main():
    print("hello of", os.environ["RANK"], *sys.argv[1:])
    words = [os.environ["WORLD_SIZE"], os.environ["OMP_NUM_THREADS"], str(os.getppid())]
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert not sys.stdin.read()
    Path(f"rank-{os.environ['RANK']}.txt").write_text(" ".join(words))
    threading.Thread(target=write).start()
    return 0
"""


@pytest.mark.parametrize("alone", [True, False])
def test_ranks_are_forks_unless_the_command_has_threads(
    alone: bool, start: Callable[..., Command], tmp_path: Path
) -> None:
    """A fork of a process with threads may wait for a lock of a thread that is not there."""
    thread = "threading.Thread(target=time.sleep, args=[600], daemon=True).start()"
    command = start(REPORTS, "" if alone else thread)
    code, out, err = command.wait()
    assert (code, out) == (0, ""), err
    assert err == "hello of 0 word\n"
    assert (tmp_path / "logs" / "rank-1.log").read_text() == "hello of 1 word\n"
    process = (tmp_path / "template").read_text()
    assert [command.lines(f"rank-{rank}.txt") for rank in (0, 1)] == [["2", "3", process]] * 2
    imports, handlers = command.lines("imports"), command.lines("handlers")
    assert len(imports) == (1 if alone else 3)
    assert len(set(handlers)) == len(handlers) == 3  # those of the command and of both ranks
    assert len(list(tmp_path.glob("thread-*"))) == 2  # ranks wait for their threads


def test_an_error_of_a_rank_ends_it(start: Callable[..., Command]) -> None:
    code, _, err = start("def main():\n    raise KeyError('here')\n").wait()
    assert code == 1 and "KeyError: 'here'" in err and "rank 0 exited with code 1" in err
    assert "command.py" not in err  # nothing of the command runs in a rank


def test_a_signal_to_all_processes_reaches_the_ranks(start: Callable[..., Command]) -> None:
    """Schedulers and terminals send signals to the whole process group."""
    command = start(WAITS)
    ranks = command.ranks()
    os.killpg(command.process.pid, signal.SIGTERM)
    assert command.wait()[0] == INTERRUPTED
    assert all((command.folder / f"saved-{rank}").exists() for rank in ranks)


@pytest.mark.parametrize("killed", ["command", "template"])
def test_no_rank_outlives_its_launcher(killed: str, start: Callable[..., Command]) -> None:
    command = start(WAITS)
    ranks = command.ranks()
    template = int((command.folder / "template").read_text())
    os.kill(command.process.pid if killed == "command" else template, signal.SIGKILL)
    code, _, err = command.wait()
    if killed == "template":
        assert code == 1 and "rank 0 was killed by SIGKILL" in err
    wait_for(lambda: not any(alive(process) for process in (template, *ranks)))


SLOW = """
def main():
    Path(f"rank-{os.getpid()}").touch()
    time.sleep(1)
    Watched()
    time.sleep(600)
"""


def test_no_rank_begins_after_its_launcher_was_killed(start: Callable[..., Command]) -> None:
    """A rank that has not yet asked the kernel to end with its parent finds another parent."""
    command = start(SLOW)
    ranks = command.ranks()
    command.process.kill()
    command.wait()
    wait_for(lambda: not any(map(alive, ranks)))


def test_a_template_that_is_killed_before_it_starts_ranks_is_named(
    start: Callable[..., Command],
) -> None:
    before = "template.die_with_parent = lambda: os.kill(os.getpid(), 9)"
    code, _, err = start(WAITS, before).wait()
    assert code == 1 and "the process that imports torch for the ranks ended" in err
    assert "Traceback" not in err
