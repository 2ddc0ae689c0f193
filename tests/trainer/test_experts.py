"""Runs whose experts are split: the command from outside."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

SHARED = str(Path(__file__).with_name("shared.yaml"))
MORE = ("--model", SHARED, "synthetic.steps=12", "recompute=block")


def lines(path: Path) -> int:
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.slow
def test_a_run_with_split_experts_takes_the_rows_of_one_rank(trainer: Any, whole: Any) -> None:
    trainer.run("--model", SHARED, "--processes", "2", "layout.ep=2")
    assert trainer.lines("ledger.jsonl") == trainer.lines("ledger.jsonl", whole(1))
    assert all(1 <= entry["expert_load"] <= 2 for entry in trainer.lines("metrics.jsonl"))
    assert "Expert load" in (trainer.out / "report.html").read_text()
    assert "Expert load" not in (whole(1) / "report.html").read_text()


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_run_resumes_with_whole_experts_and_back(trainer: Any, tmp_path: Path) -> None:
    """Two ranks: split experts, killed; whole ones on one rank; split again. The rows are those of
    one rank, and so are the losses."""
    whole = tmp_path / "whole"
    trainer.run(*MORE, out=whole)
    process = trainer.start(*MORE, "--processes", "2", "layout.ep=2")
    while lines(trainer.out / "metrics.jsonl") < 3:
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    trainer.run(*MORE, "--processes", "1", "layout.ep=1", "--stop-after", "9", code=85)
    trainer.run(*MORE, "--processes", "2", "layout.ep=2")
    assert trainer.lines("ledger.jsonl") == trainer.lines("ledger.jsonl", whole)
    pairs = zip(trainer.losses(), trainer.losses(whole), strict=True)
    assert max(abs(a - b) for a, b in pairs) < 2e-6
    loads = [entry.get("expert_load") for entry in trainer.lines("metrics.jsonl")]
    assert all(1 <= load <= 2 for load in (loads[0], loads[-1])) and loads[8] is None
