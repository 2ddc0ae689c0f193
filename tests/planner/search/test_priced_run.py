"""`trainer plan price`: the price of a run's own layout is that of the plan with this layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from formats.samples import pin_keys

from headrace.console import config as reader
from headrace.dataplane.runlog.writer import LineWriter
from headrace.planner.hardware import Hardware
from headrace.planner.search.priced_run import read_stored_run, replace_imbalance
from headrace.trainer.cli import main
from headrace.trainer.run.layout_plan import load_plan, run_settings
from headrace.trainer.run.request import RunRequest
from headrace.trainer.run.resolve import resolve

ROWS = ("--seq-len", "1024", "--batch-tokens", "16Ki")
CLUSTER = ("--hardware", "h100", "--roofline")
PARTS = ("by", "memory_by", "layout", "best_layout")
PLANNED = ("--model", "tiny-transformer", *ROWS, *CLUSTER)


def plan(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["plan", *words])
    assert result.exit_code == code, result.output
    return result


@pytest.fixture
def priced(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """A function that prices a run with these settings."""

    def price(settings: dict[str, Any], *words: str, gpus: int = 4) -> dict[str, Any]:
        file = tmp_path / "run.yaml"
        file.write_text(reader.dump(settings))
        [answer] = json.loads(
            plan("price", str(file), *PLANNED, "--gpus", str(gpus), "--json", *words).stdout
        )
        assert isinstance(answer, dict)
        return answer

    return price


@pytest.mark.parametrize("asked", ["pp=1", "pp=2,schedule=interleaved", "cp=2,engine=deepspeed"])
def test_the_layout_of_a_plan_has_the_plan_s_price(
    asked: str, priced: Callable[..., dict[str, Any]]
) -> None:
    words = [*PLANNED, "--gpus", "4", "--explain", asked, "--json"]
    [explained] = json.loads(plan(*words).stdout)["explained"]
    layout = {name: explained["layout"][name] for name in ("pp", "cp", "tp", "schedule", "chunks")}
    tokens = explained["layout"]["rows"] * 1024 // layout["cp"]
    engine = {"kind": explained["layout"]["engine"]}
    engine |= {name: explained["layout"][name] for name in ("gather", "zero")
               if name in explained["layout"]}  # fmt: skip
    answer = priced({"layout": layout, "engine": engine, "micro_batch_tokens": tokens})
    assert answer["layout"] == explained["layout"]
    assert answer["seconds"] == pytest.approx(explained["seconds"], rel=0.05), "other cuts at most"
    assert answer["best_seconds"] == pytest.approx(explained["best_seconds"])
    assert answer["tokens_per_second"] == pytest.approx(16384 / answer["seconds"])
    assert 0 < answer["mfu"] < 1 and answer["fits"]
    errors = {band.runs: band.error for band in Hardware.load("h100").file.bands}
    kinds = ["dense", "context"] if layout["cp"] > 1 else ["dense"]
    assert answer["error"] == max(errors[kind] for kind in kinds)
    assert any(size.startswith("glu (length") for size in answer["outside"])
    pin_keys("plan-price", {**answer, **{key: {} for key in PARTS}})


def test_the_best_plan_as_a_run_is_the_best(
    tmp_path: Path, priced: Callable[..., dict[str, Any]]
) -> None:
    file = tmp_path / "plan.yaml"
    plan(*PLANNED, "--gpus", "2", "--out", str(file))
    best = load_plan(file)
    answer = priced(run_settings(best, str(file)), gpus=2)
    assert answer["seconds"] == pytest.approx(best.predicted.seconds, rel=1e-12)
    assert answer["memory"] == best.predicted.memory and answer["by"] == best.predicted.by
    slower = priced(run_settings(best, str(file)), "--no-search", "recompute=block", gpus=2)
    assert slower["seconds"] > answer["seconds"] and slower["memory"] < answer["memory"]
    assert "recompute" in slower["by"] and slower["best_seconds"] is None


def test_a_run_that_would_not_start_has_no_price(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("layout: {tp: 3}\n")
    words = ("price", str(file), *PLANNED, "--gpus", "4")
    assert "layout.tp=3" in plan(*words, code=1).stderr
    file.write_text("recompute: {save: [attention]}\n")
    assert "no price for the choices of layer 0" in plan(*words, code=1).stderr
    file.write_text("{}\n")
    assert "missing --model" in plan("price", str(file), *ROWS, *CLUSTER, code=2).stderr


def test_a_folder_knows_model_rows_devices_and_its_experts_load(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    rows = ["synthetic.steps=4", "synthetic.seq_len=64", "synthetic.batch_rows=8"]
    words = [*rows, "synthetic.warmup=1", "processes=2", "layout.ep=2", "device=cpu"]
    job = resolve(RunRequest(model="tiny-moe", out=str(folder), overrides=words))
    job.folder.prepare()
    job.save()
    writer = LineWriter(job.folder.metrics)
    for load in (1.4, 1.6, 1.5):
        writer.write({"step": 0, "expert_load": load})
    stored = read_stored_run(str(folder))
    assert (stored.expert_load, stored.run.processes) == (1.5, 2)
    even = Hardware(replace(Hardware.load("h100").file, name="even"), "even")
    even = replace_imbalance(even, 1.0)
    even.save(tmp_path / "even.yaml")

    def experts(hardware: str) -> float:
        words = ("price", str(folder), "precision=bf16", "--hardware", hardware, "--roofline")
        [answer] = json.loads(plan(*words, "--no-search", "--json").stdout)
        return float(answer["by"]["experts"])

    assert experts("h100") > experts(str(tmp_path / "even.yaml"))
