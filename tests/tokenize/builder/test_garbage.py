"""Builds that fail or are killed: finished shards are kept, and the next build removes the garbage,
and may be killed meanwhile."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.data.corpora import snapshot, texts, write_jsonl

from headrace.console.errors import StorageError
from headrace.dataplane.datasets import manifest
from headrace.dataplane.storage import storage
from headrace.tokenize.builder import tasks

Run = Callable[..., Path]


@pytest.mark.parametrize("options", [{}, {"shuffle": 1, "dedup": "exact", "splits": {"val": 0.1}}])
def test_a_build_that_fails_anywhere_resumes_to_the_same_bytes(
    corpus: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Fail at every single write and delete of the build, one after another."""
    whole = snapshot(run_build(corpus, out="whole", **options))
    calls_until_failure = 0

    def failing(act: Callable[..., None]) -> Callable[..., None]:
        def fail(url: str, *data: bytes) -> None:
            nonlocal calls_until_failure
            if "/claims/" not in url:
                if calls_until_failure == 0:
                    raise StorageError("the disk is gone")
                calls_until_failure -= 1
            act(url, *data)

        return fail

    for name in ("write", "delete"):
        monkeypatch.setattr(storage, name, failing(getattr(storage, name)))
    for allowed in range(1000):
        calls_until_failure = allowed
        try:
            run_build(corpus, out="again", **options)
        except StorageError:
            continue
        break
    assert allowed > 3
    assert snapshot(corpus.parent / "again") == whole


def test_finished_shards_are_not_rebuilt(
    corpus: Path, run_build: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []
    write_shard = tasks.write_shard

    def counting(*args: Any, **options: Any) -> Any:
        if len(written) == 5:
            raise KeyboardInterrupt
        written.append(args[3])
        return write_shard(*args, **options)

    monkeypatch.setattr(tasks, "write_shard", counting)
    with pytest.raises(KeyboardInterrupt):
        run_build(corpus)
    first = list(written)
    written.clear()
    monkeypatch.setattr(tasks, "write_shard", write_shard)
    stat = {path.name: path.stat().st_mtime_ns for path in (corpus.parent / "out").rglob("*.arrow")}
    out = run_build(corpus)
    assert len(first) == len(stat) == 5
    for name, when in stat.items():
        assert (out / "shards" / name).stat().st_mtime_ns == when


@pytest.fixture
def killed(run_build: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """Return a function that builds and is killed after `after` deletions, or at the first manifest
    if None. It returns True if the build was killed."""

    def run(*inputs: Path, after: int | None = None, **options: Any) -> bool:
        delete, deletions_until_kill = storage.delete, after

        def dying(url: str, *_: object) -> None:
            nonlocal deletions_until_kill
            if "/claims/" not in url:
                if not deletions_until_kill:
                    raise KeyboardInterrupt
                deletions_until_kill -= 1
            delete(url)

        with monkeypatch.context() as patch:
            where = (manifest, "save") if after is None else (storage, "delete")
            patch.setattr(*where, dying)
            try:
                run_build(*inputs, **options)
            except KeyboardInterrupt:
                return True
        return False

    return run


def test_work_files_are_removed_and_other_files_kept(corpus: Path, run_build: Run) -> None:
    """Garbage is removed even if nothing else is to do; files of other programs stay."""
    (corpus.parent / "out" / "work").mkdir(parents=True)
    (corpus.parent / "out" / "work" / "diary").touch()
    whole = snapshot(out := run_build(corpus))
    assert "work/diary" in whole
    leftovers = ["work/claims/.0.json.01234567.tmp", "work/tasks/0.json", "work/spills/0.arrow"]
    leftovers += ["shards/.new.01234567.tmp", ".manifest.json.01234567.tmp"]
    leftovers += [f"{name}/{'0' * 32}.json" for name in ("shards", "tables", "tokenizers")]
    for name in leftovers:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).touch()
    run_build(corpus)
    assert snapshot(out) == whole


@pytest.mark.parametrize("options", [{}, {"dedup": "exact", "shuffle": 2, "splits": {"val": 0.2}}])
def test_stale_task_states_do_not_hide_lost_shards(
    tmp_path: Path, run_build: Run, killed: Callable[..., bool], options: dict[str, Any]
) -> None:
    """A build is killed at its very end: its datasets are complete, and some of its task states
    still exist."""
    corpus = write_jsonl(tmp_path / "a.jsonl", texts(90))
    whole = snapshot(run_build(corpus, **options))
    assert killed(corpus, out="end", after=0, **options)
    for number in itertools.count(step=3):
        out = tmp_path / f"out{number}"
        shutil.copytree(tmp_path / "end", out)
        if not killed(corpus, out=out.name, after=number, **options):
            break
        next(iter(out.rglob("shards/*"))).unlink()
        assert snapshot(run_build(corpus, out=out.name, **options)) == whole
    assert number > 2
    assert snapshot(out) == whole


def test_a_killed_build_that_loses_an_input(
    tmp_path: Path, run_build: Run, killed: Callable[..., bool]
) -> None:
    """A build is killed before its manifest. The next one has fewer inputs and is killed while it
    removes garbage. The third one has all inputs again."""
    first_input, second_input = (
        write_jsonl(tmp_path / f"{k}.jsonl", texts(90, seed=k)) for k in range(2)
    )
    options = {"format": "mds"}
    half = snapshot(run_build(first_input, out="whole", **options))
    shutil.copytree(tmp_path / "whole", tmp_path / "begun")
    whole = snapshot(run_build(first_input, second_input, out="whole", **options))
    assert killed(first_input, second_input, out="begun", **options)
    for number in itertools.count():
        out = tmp_path / f"out{number}"
        shutil.copytree(tmp_path / "begun", out)
        if not killed(first_input, out=out.name, after=number, **options):
            break
        assert snapshot(run_build(first_input, second_input, out=out.name, **options)) == whole
    assert number > 5
    assert snapshot(out) == half


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kills", "options"),
    [
        (3, ["--shuffle", "5", "--dedup", "exact"]),
        pytest.param(9, ["--shuffle", "5", "--dedup", "exact"], marks=pytest.mark.long),
        pytest.param(
            9,
            ["--shuffle", "5", "--shuffle-memory", "256Ki"],
            marks=pytest.mark.long,
        ),
        pytest.param(6, [], marks=pytest.mark.long),
    ],
)
def test_kill_9_at_any_moment(tmp_path: Path, kills: int, options: list[str]) -> None:
    for number in range(3):
        write_jsonl(tmp_path / "corpus" / f"{number}.jsonl", texts(400 * kills, seed=number))
    command = [
        *(sys.executable, "-c", "from headrace.tokenize.cli import main; main()", "build"),
        *(str(tmp_path / "corpus"), "--tokenizer", "byte", "--shard-size", "64Ki"),
        *("--workers", "2", *options, "--out"),
    ]
    began = time.monotonic()
    subprocess.run([*command, str(tmp_path / "whole")], check=True, capture_output=True)
    seconds = time.monotonic() - began
    rng = random.Random(0)
    out = tmp_path / "killed"
    for _ in range(kills):
        process = subprocess.Popen(
            [*command, str(out)], start_new_session=True, stderr=subprocess.PIPE
        )
        try:
            process.wait(rng.uniform(0.1, 0.8) * seconds)
            break
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if (out / "manifest.json").exists():
            manifest.load(str(out))  # complete, or missing
    run = subprocess.run([*command, str(out)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert snapshot(out) == snapshot(tmp_path / "whole")
