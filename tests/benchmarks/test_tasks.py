"""Tasks of the long benchmarks: time limits, resuming, and complete lines."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.long._tasks import Report, Task, failed, run, run_all, unfinished

ROOT = Path(__file__).parents[2]


def script(tmp_path: Path, code: str) -> tuple[str, ...]:
    """Return the command of a process with this code."""
    file = tmp_path / f"{abs(hash(code))}.py"
    file.write_text(f"import os, sys, time, signal\nfrom pathlib import Path\n{code}\n")
    return (str(file),)


def test_a_process_that_takes_too_long_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    code = """
import subprocess
print(subprocess.Popen(["sleep", "60"]).pid)
time.sleep(60)
"""
    report = Report(tmp_path / "lines")
    run(Task("slow", script(tmp_path, code), limit=4), report)
    started, result = report.lines
    assert result.startswith("slow: stopped after 4 s")
    until = time.monotonic() + 60
    while "sleep" in (command := command_of(int(started))) and time.monotonic() < until:
        time.sleep(0.02)
    assert "sleep" not in command


def command_of(process: int) -> str:
    """Return the command of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{process}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def test_an_item_that_ends_its_process_has_a_line_and_the_others_go_on(tmp_path: Path) -> None:
    code = """
for item in sys.argv[1:]:
    if item == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if item == "hang":
        time.sleep(60)
    print(f"{item}: measured by {os.getpid()}")
"""
    items = ("first", "crash", "second", "hang", "third", "fourth")
    task = Task("measure", script(tmp_path, code), limit=4, items=items)
    report = Report(tmp_path / "lines")
    run_all([task], report)
    results = {name: report.result(name) or "" for name in items}
    assert results["crash"].startswith("failed: killed by SIGSEGV")
    assert results["hang"].startswith("stopped after 4 s")
    processes = [results[name].removeprefix("measured by ") for name in ("first", "second")]
    assert all(map(str.isdigit, processes)) and processes[0] != processes[1]
    assert results["third"] == results["fourth"] and results["third"].startswith("measured")
    assert failed([task], report) == ["crash", "hang"]
    assert (tmp_path / "lines").read_text().splitlines() == report.lines


def test_an_item_without_a_line_is_named(tmp_path: Path) -> None:
    report = Report(None)
    run(Task("measure", script(tmp_path, "print('a: 1')"), 9, items=("a", "b")), report)
    assert report.lines == ["a: 1", "b: failed: its process ended without a line for it"]


def test_an_exit_code_is_a_failure(tmp_path: Path) -> None:
    report = Report(None)
    task = Task("check", script(tmp_path, "print('WRONG x: 1e3'); sys.exit(1)"), 9)
    run(task, report)
    assert failed([task], report) == ["check"]
    assert report.lines[0] == "WRONG x: 1e3"


def test_results_in_the_file_are_not_measured_again(tmp_path: Path) -> None:
    file, count = tmp_path / "lines", tmp_path / "count"
    code = f"with open({str(count)!r}, 'a') as file: file.write(sys.argv[1] + ' ')"
    tasks = [Task(name, (*script(tmp_path, code), name), 9) for name in ("a", "b", "c")]
    run_all(tasks[:2], Report(file))
    file.write_text(file.read_text() + "c: pas")  # killed while it wrote
    report = Report(file, resumed=True)
    assert unfinished(tasks, report) == ["c"]
    run_all(tasks, report)
    assert count.read_text() == "a b c "
    assert [line.partition(",")[0] for line in file.read_text().splitlines()] == [
        *("a: passed", "b: passed", "c: passed")
    ]
    run_all(tasks, Report(file, resumed=True, again=["b*"]))
    assert count.read_text() == "a b c b "


def test_what_the_time_does_not_allow_is_run_the_next_time(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    code = f"""
begun = Path({str(begun)!r})
if not begun.exists():
    begun.touch()
    time.sleep(60)
"""
    file = tmp_path / "lines"
    work = [Task(name, script(tmp_path, code), limit=90) for name in ("long", "later")]
    report = Report(file)
    began = time.monotonic()
    run_all(work, report, until=began + 2)
    assert time.monotonic() - began < 30
    assert unfinished(work, report) == ["long", "later"] and not failed(work, report)
    run_all(work, report)
    assert not unfinished(work, Report(file, resumed=True)) and not failed(work, report)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_part_leaves_complete_lines_and_goes_on(tmp_path: Path, number: int) -> None:
    again = tmp_path / "again"
    code = f"""
for item in sys.argv[1:]:
    while item == "6" and not Path({str(again)!r}).exists():
        time.sleep(0.1)
    print(f'{{item}}: ' + 'x' * 5000)
"""
    driver = f"""
sys.path.insert(0, {str(ROOT)!r})
from benchmarks.long._tasks import *
stop_with_tasks()
task = Task("t", {script(tmp_path, code)!r}, 60, items=tuple(str(n) for n in range(12)))
run_all([task], Report(Path({str(tmp_path)!r}) / "lines", resumed=True))
"""
    command = [sys.executable, *script(tmp_path, driver)]
    file = tmp_path / "lines"
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    while not file.exists() or file.stat().st_size < 12_000:
        time.sleep(0.02)
    process.send_signal(number)
    process.wait(60)
    before = file.read_text()
    assert before.endswith("\n") and 2 <= len(before.splitlines()) <= 6
    again.touch()
    assert subprocess.run(command, stdout=subprocess.DEVNULL).returncode == 0
    assert file.read_text().startswith(before)
    assert [line.split(":")[0] for line in file.read_text().splitlines()] == [
        str(n) for n in range(12)
    ]
