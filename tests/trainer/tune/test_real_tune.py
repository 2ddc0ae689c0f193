"""`trainer profile`, `plan` and `tune` on this machine, killed and continued."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from headrace.trainer.run.layout_plan import load_plan

MODEL = ("--model", "tiny-transformer")


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "headrace.trainer.cli", *map(str, words)]


def cli(*words: object) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command(*words), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_tune_that_is_killed_continues_and_corrects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    cores = os.cpu_count()
    cli("profile", "--quick", "--device", "cpu", "--processes", cores, "--out", "cpu.yaml")
    batch = ("--seq-len", 256, "--batch-tokens", 2048, "--gpus", 1)
    cli("plan", *MODEL, *batch, "--hardware", "cpu.yaml", "--out", "plan.yaml")
    words = ("tune", "plan.yaml", *MODEL, "--hardware", "cpu.yaml", "--trials", 3, "--steps", 8)
    words = (*words, "--out", "out", "threads=1", "--json")
    first = tmp_path / "out" / "results" / "00-0.json"
    started = subprocess.Popen(command(*words), stderr=subprocess.DEVNULL)
    while not first.exists():
        assert started.poll() is None
        time.sleep(0.05)
    started.send_signal(signal.SIGKILL)
    started.wait()
    written = first.stat().st_mtime_ns
    result: Any = json.loads(cli(*words).stdout)
    assert first.stat().st_mtime_ns == written
    assert [each["outcome"] for each in result["layouts"]] == ["measured"] * 3
    assert result["errors"]["after"] < 0.15
    assert {each["clock"] for each in result["layouts"]} == {"cpu_seconds"}
    best = load_plan(tmp_path / "out" / "plan.yaml")
    assert best.measured is not None and best.measured.memory
    assert not list((tmp_path / "out" / "trials").glob("*/checkpoints"))
