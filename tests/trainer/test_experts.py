"""Runs whose experts are split: the command from outside."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.configs import CONFIGS
from support.pages.written_runs import drawn_data

from headrace.trainer.checkpoints import store

SHARED = str(CONFIGS / "shared.yaml")
MORE = ("--model", SHARED, "synthetic.steps=12", "recompute=block")


@pytest.mark.slow
def test_a_run_with_split_experts_takes_the_rows_of_one_rank(trainer: Any, whole: Any) -> None:
    trainer.run("--model", SHARED, "--processes", "2", "layout.ep=2")
    assert trainer.lines("ledger.jsonl") == trainer.lines("ledger.jsonl", whole(1))
    assert all(1 <= entry["expert_load"] <= 2 for entry in trainer.lines("metrics.jsonl"))
    for run, drawn in ((trainer.out, True), (whole(1), False)):
        [shown] = drawn_data((run / "report.html").read_text())["runs"]
        assert ("expert_load" in shown["series"]) is drawn


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_killed_run_resumes_in_other_layouts(trainer: Any, tmp_path: Path) -> None:
    """Two stages, killed; split experts; one rank; split experts on two stages. The rows are those
    of one rank, and so are the losses."""
    whole = tmp_path / "whole"
    trainer.run(*MORE, out=whole)
    process = trainer.start(*MORE, "--processes", "2", "layout.pp=2")
    while not store.committed(trainer.out / "checkpoints"):
        assert process.poll() is None
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    trainer.run(*MORE, "--processes", "2", "layout.ep=2", "--stop-after", "9", code=85)
    trainer.run(*MORE, "--stop-after", "10", code=85)
    trainer.run(*MORE, "--processes", "4", "layout.pp=2", "layout.ep=2")
    assert trainer.lines("ledger.jsonl") == trainer.lines("ledger.jsonl", whole)
    pairs = zip(trainer.losses(), trainer.losses(whole), strict=True)
    assert max(abs(a - b) for a, b in pairs) < 2e-6
    loads = [entry.get("expert_load") for entry in trainer.lines("metrics.jsonl")]
    assert loads[0] is None and loads[9] is None
    assert all(1 <= load <= 2 for load in (loads[8], *loads[10:]))


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ("--processes", "2", "layout.ep=2"),
        ("--processes", "4", "layout.pp=2", "layout.ep=2", "engine.kind=deepspeed"),
    ],
)
def test_the_same_layout_resumes_to_the_bit(
    trainer: Any, tmp_path: Path, words: tuple[str, ...]
) -> None:
    trainer.run(*MORE, *words, out=tmp_path / "undisturbed")
    trainer.run(*MORE, *words, "--stop-after", "5", code=85)
    trainer.run(*MORE, *words)
    assert trainer.losses() == trainer.losses(tmp_path / "undisturbed")
    assert trainer.lines("ledger.jsonl") == trainer.lines("ledger.jsonl", tmp_path / "undisturbed")


ON_TWO = ["fsdp2-0-fp32-ep2", "deepspeed-1-fp32-ep2", "deepspeed-2-bf16-ep2"]
ON_FOUR = ["fsdp2-0-fp32-pp2ep2", "deepspeed-1-bf16-pp2ep2", "deepspeed-2-fp32-tp2ep2"]


@pytest.mark.parametrize(
    ("size", "layouts"),
    [
        pytest.param(2, ON_TWO[-1:], marks=pytest.mark.slow),
        pytest.param(2, ON_TWO, marks=pytest.mark.long),
        pytest.param(4, ON_FOUR, marks=pytest.mark.long),
    ],
)
def test_a_step_that_one_rank_spoils_is_skipped_by_all_experts(
    in_processes: Any, size: int, layouts: list[str]
) -> None:
    result = in_processes(size, "left_out", layouts=layouts, faulty=1, model="shared")
    assert result == {layout: [False, True, True, True] for layout in layouts}


@pytest.mark.slow
def test_biases_follow_the_loads_of_all_ranks(in_processes: Any, tmp_path: Path) -> None:
    """Stages and split experts have the biases of one rank, to the bit. A resume continues to the
    bit, also where the weights are bf16: the biases stay fp32."""
    alone, together = tmp_path / "alone", tmp_path / "together"
    for folder in (alone, together):
        folder.mkdir()
    arguments: dict[str, Any] = {"steps": 3, "model": "experts"}
    in_processes(1, "parity", alone, layouts=["fsdp2-0-fp32"], **arguments)
    layouts = ["fsdp2-0-fp32-pp2", "fsdp2-0-fp32-ep2", "deepspeed-2-fp32-ep2"]
    in_processes(2, "parity", together, layouts=layouts, **arguments)
    whole = torch.load(alone / "fsdp2-0-fp32.pt")
    [name] = (name for name in whole if name.endswith("correction_bias"))
    assert len(whole[name].unique()) > 1
    for layout in layouts:
        assert torch.equal(torch.load(together / f"{layout}.pt")[name], whole[name]), layout
    saved = ["fsdp2-0-bf16-ep2", "deepspeed-1-fp32-pp2"]
    kept = in_processes(2, "save_all", tmp_path, layouts=saved, steps=2, model="experts")
    loaded = {"sources": saved, "targets": saved, "steps": 2, "model": "experts"}
    result = in_processes(2, "load_all", tmp_path, used=True, **loaded)
    assert {worst for worst, _ in result.values()} == {0.0}
    assert all(result[f"{layout} → {layout}"][1] == kept[layout] for layout in saved)
