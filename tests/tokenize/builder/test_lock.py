from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.console.errors import BusyError, StorageError
from headrace.dataplane.storage import storage
from headrace.tokenize.builder import lock
from headrace.tokenize.builder.lock import BuildLock, LockTimes


def write_other_lock(folder: Path, **values: Any) -> Path:
    """Write the lock file of another process."""
    folder.mkdir(exist_ok=True)
    path = folder / "0.json"
    data = {"host": "elsewhere", "machine": "another", "pid": 1, "started": "1", "holding": True}
    path.write_text(json.dumps({**data, "renewals": 1, "begun": "then", **values}))
    return path


def locks_in(folder: str) -> list[Path]:
    return list(Path(folder).glob("*.json"))


def test_the_lock_file_exists_while_the_lock_is_held(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    with BuildLock(str(folder)) as held:
        (path,) = folder.iterdir()
        assert json.loads(path.read_text())["pid"] == os.getpid()
        held.check()
    assert not folder.exists()


@pytest.mark.parametrize("wrong", [-1e6, 1e6])
def test_a_lock_of_another_machine_is_watched_whatever_the_clocks_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: float
) -> None:
    """A build that renews its lock is alive; one that does not for `lease` seconds is dead."""
    folder, clock = tmp_path / "claims", time.time
    monkeypatch.setattr("time.time", lambda: clock() + wrong)
    times = LockTimes(lease=0.8)
    path = write_other_lock(folder)
    fields, end = json.loads(path.read_text()), threading.Event()

    def renew() -> None:
        for renewals in itertools.count(2):
            if end.wait(0.1):
                return
            storage.write(str(path), json.dumps({**fields, "renewals": renewals}).encode())

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        with (
            pytest.raises(BusyError, match="process 1 on elsewhere"),
            BuildLock(str(folder), times),
        ):
            pass
    finally:
        end.set()
        thread.join()
    assert [item.name for item in folder.iterdir()] == ["0.json"]
    start = time.monotonic()
    with BuildLock(str(folder), times):
        assert not path.exists()
    assert time.monotonic() - start > times.lease


@pytest.mark.parametrize("name", ["0.json", "g.json"])
def test_two_builds_of_two_machines_that_start_together_never_hold_the_lock_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Each waits for a sign of life of the other; the second gives up, or follows the first."""
    times = LockTimes(lease=2.0, start_renewal=0.1)
    folder, machine = tmp_path / "claims", lock._machine
    inner = threading.local()
    monkeypatch.setattr(lock, "_machine", lambda: getattr(inner, "machine", machine()))
    events: list[str] = []

    def contend(machine: str, name: str) -> None:
        inner.machine = machine
        held = BuildLock(str(folder), times)
        held.name = name
        try:
            with held:
                events.append(f"+{name}")
                time.sleep(0.5)
                held.check()
                events.append(f"-{name}")
        except BusyError:
            assert f"+{name}" not in events

    threads = [
        threading.Thread(target=contend, args=(f"machine {k}", name))
        for k, name in enumerate([name, "a.json"])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events
    for entered, exited in zip(events[::2], events[1::2], strict=True):
        assert entered == f"+{exited[1:]}"


def test_a_build_whose_lock_was_taken_for_dead_stops(tmp_path: Path) -> None:
    """It slept for longer than its lease; the build that took the lock may have ended since."""
    folder = tmp_path / "claims"
    with BuildLock(str(folder)) as held:
        (path,) = folder.iterdir()
        path.unlink()
        with pytest.raises(BusyError, match="could not renew its lock"):
            held.check()


def test_half_written_locks_of_killed_builds_are_removed(tmp_path: Path) -> None:
    folder = tmp_path / "claims"
    folder.mkdir()
    (folder / ".0123.json.tmp").write_text("{")
    (folder / ".diary").touch()
    with BuildLock(str(folder)):
        assert [path.name for path in folder.iterdir() if path.suffix == ".tmp"] == []
        (folder / ".diary").unlink()  # no other file is touched
    assert not folder.exists()


def test_a_lock_of_a_dead_process_is_ignored(tmp_path: Path) -> None:
    folder = str(tmp_path / "claims")
    code = (
        "from headrace.tokenize.builder.lock import BuildLock\n"
        f"BuildLock({folder!r}).__enter__(); input()"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    deadline = time.monotonic() + 300
    while not any(json.loads(path.read_text())["holding"] for path in locks_in(folder)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    with pytest.raises(BusyError, match=f"process {process.pid}"), BuildLock(folder):
        pass
    process.send_signal(signal.SIGKILL)
    process.wait()
    with BuildLock(folder):
        pass


def test_a_build_that_lost_its_lock_stops(tmp_path: Path) -> None:
    with BuildLock(str(tmp_path / "claims")) as held:
        write_other_lock(tmp_path / "claims")
        with pytest.raises(BusyError, match="could not renew its lock"):
            held.check()


def test_at_most_one_process_holds_the_lock(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    log = tmp_path / "log"
    log.touch()
    start = context.Event()
    processes = [
        context.Process(target=contend, args=(tmp_path / "claims", log, start)) for _ in range(6)
    ]
    for process in processes:
        process.start()
    start.set()
    for process in processes:
        process.join()
    events = log.read_text().splitlines()
    assert events
    for entered, exited in zip(events[::2], events[1::2], strict=True):
        assert entered == f"+{exited[1:]}"


def contend(folder: Path, log: Path, start: Any) -> None:
    start.wait()
    for _ in range(3):
        try:
            with BuildLock(str(folder)), log.open("a", buffering=1) as file:
                file.write(f"+{os.getpid()}\n")
                time.sleep(0.05)
                file.write(f"-{os.getpid()}\n")
        except BusyError:
            time.sleep(0.05)


def test_a_file_that_is_not_a_lock_is_an_error(tmp_path: Path) -> None:
    for text in ("{", "[]", "{}"):
        (tmp_path / "0.json").write_text(text)
        with (
            pytest.raises(StorageError, match=r"0\.json is not the lock"),
            BuildLock(str(tmp_path)),
        ):
            pass
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".json"] == ["0.json"]
