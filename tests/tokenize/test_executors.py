from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.data.corpora import ONE, snapshot, texts, write_jsonl

from headrace.console.errors import InputError, RunError
from headrace.dataplane.datasets import manifest
from headrace.tokenize import executors
from headrace.tokenize.executors import ExecutorConfig
from headrace.tokenize.neardup.find import NeardupConfig, find_neardups


def squares(number: int) -> Iterator[int]:
    yield number
    yield number * number


def fails(number: int) -> Iterator[int]:
    yield number
    if number == 3:
        raise InputError("three is no number", where="here", hint="count differently")


def breaks(number: int) -> Iterator[int]:
    yield 1 // (number - 3)


def dies(number: int) -> Iterator[int]:
    os.kill(os.getpid(), signal.SIGKILL)
    yield number


@pytest.mark.parametrize("workers", [1, 2])
def test_all_events_of_tasks_are_yielded(workers: int) -> None:
    result = list(executors.run(ExecutorConfig(workers=workers), squares, range(5)))
    assert sorted(result) == sorted([*range(5), *(k * k for k in range(5))])


def test_a_user_error_of_a_task_reaches_the_caller(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="three is no number") as caught:
        list(executors.run(ExecutorConfig(workers=2), fails, range(6)))
    assert caught.value.hint == "count differently"


def test_a_bug_in_a_task_shows_its_traceback() -> None:
    with pytest.raises(RuntimeError, match="in breaks"):
        list(executors.run(ExecutorConfig(workers=2), breaks, range(6)))


def test_a_dead_worker_is_an_error() -> None:
    with pytest.raises(RunError, match="signal 9"):
        list(executors.run(ExecutorConfig(workers=2), dies, range(2)))


def test_invalid_configurations_are_errors() -> None:
    for options, message in (
        ({"workers": 0}, "must be at least 1"),
        ({"address": "here:1"}, "needs kind `ray`"),
        ({"kind": "ray", "workers": 2}, "has its own workers"),
    ):
        with pytest.raises(ValueError, match=message):
            ExecutorConfig(**options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    handler = signal.getsignal(signal.SIGTERM)  # Ray installs one, and leaves it
    try:
        ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
        yield ray
    finally:
        ray.shutdown()
        signal.signal(signal.SIGTERM, handler)


@pytest.mark.slow
def test_ray_builds_the_same_bytes(corpus: Path, run_build: Any, ray: Any) -> None:
    """The messages about bad lines are equal too."""
    for name in ("bad", "worse"):
        (corpus / f"{name}.jsonl").write_text('{"text\n{"text": "good"}\n{"body": "x"}\n')
    options: dict[str, Any] = {"shuffle": 1, "dedup": "exact", "splits": {"val": 0.1}}
    there = run_build(
        corpus, out="ray", on_error="skip", engine=ExecutorConfig(kind="ray"), **options
    )
    local = run_build(corpus, out="local", on_error="skip", engine=ONE, **options)
    assert snapshot(local) == snapshot(there)
    provenance = manifest.load(str(there / "train")).generations[0].provenance
    assert (
        provenance["counts"]["bad: broken JSON"] == provenance["counts"]["bad: missing field"] == 2
    )
    assert sum("bad.jsonl, line 1: broken JSON" in line for line in provenance["problems"]) == 1
    assert sum("worse.jsonl, line 3: missing field" in line for line in provenance["problems"]) == 1
    options["shuffle_memory"] = 60_000
    there = run_build(
        corpus, out="ray 2", on_error="skip", engine=ExecutorConfig(kind="ray"), **options
    )
    local = run_build(corpus, out="local 2", on_error="skip", engine=ONE, **options)
    assert snapshot(local) == snapshot(there)
    with pytest.raises(InputError, match="broken JSON"):
        run_build(corpus, out="failed", engine=ExecutorConfig(kind="ray"), **options)


@pytest.mark.slow
def test_ray_finds_the_same_near_duplicates(corpus: Path, tmp_path: Path, ray: Any) -> None:
    pytest.importorskip("rensa")
    for name, engine in (("ray", ExecutorConfig(kind="ray")), ("local", ONE)):
        out = tmp_path / name / "drop.parquet"
        find_neardups(
            NeardupConfig(inputs=(str(corpus),), out=str(out), slice_size=20_000, engine=engine)
        )
    assert snapshot(tmp_path / "ray") == snapshot(tmp_path / "local")


@pytest.mark.slow
def test_workers_exit_when_their_build_is_killed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "corpus.jsonl", texts(60_000))
    code = (
        "from headrace.tokenize.builder.build import *\n"
        "if __name__ == '__main__':\n"
        f" build(BuildConfig(inputs=({str(tmp_path / 'corpus.jsonl')!r},), tokenizer='byte',"
        f" out={str(tmp_path / 'out')!r}, engine=ExecutorConfig(workers=2), slice_size=100_000))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    process = subprocess.Popen([sys.executable, str(script)], start_new_session=True)
    deadline = time.monotonic() + 300
    while not (tmp_path / "out" / "work" / "tasks").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()  # the parent alone
    process.wait()
    while _group(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not _group(process.pid)


def _group(number: int) -> list[str]:
    """Return the processes of a process group."""
    result = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == number and fields[0] != "Z":
            result.append(path.parent.name)
    return result
