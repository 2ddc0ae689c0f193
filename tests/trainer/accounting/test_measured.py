"""Measured seconds and bytes of a run beside those of its layout plan."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.pages.written_runs import check_page, make_run

from headrace.reports.report.write import write_report
from headrace.trainer.accounting import measured
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.run.job import Job
from headrace.trainer.run.layout_plan import (
    LayerSpan,
    LayoutPlan,
    Planned,
    PlannedPhase,
    Predicted,
    model_hash,
)
from headrace.trainer.run.plan_check import followed_plan
from headrace.trainer.run.stored import read_run

MIB = 1 << 20


def plan_of(job: Job) -> LayoutPlan:
    phase = PlannedPhase(name="steps", seq_len=16, batch_tokens=64, seconds=0.5, memory=30 * MIB)
    parts = {"state": 30 * MIB}
    return LayoutPlan(
        planned=Planned(
            model=model_hash(job.model), gpus=1, hardware="cpu#1", executable=True, phases=(phase,)
        ),
        layout=job.run.layout,
        engine=job.run.engine,
        micro_batch_tokens=job.run.micro_batch_tokens,
        layers=(LayerSpan(layers=(0, 4), recompute="none"),),
        predicted=Predicted(seconds=0.5, bound=0.5, by={}, memory=30 * MIB, memory_by=parts),
    )


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run with a plan, which measured its steps."""
    folder = make_run(tmp_path / "run", [3.0, 2.0])
    job = read_run(folder)
    replace(job, layout_plan=plan_of(job)).save()
    phases = {"synthetic": {"steps": 9, "seconds": 1.0, "cpu_seconds": 0.625}}
    entry = {"time": 1.0, "event": "measured", "step": 2, "phases": phases}
    with folder.events.open("a") as events:
        peaks = {"memory": [20 * MIB, 40 * MIB], "memory_phases": ["synthetic"]}
        events.write(json.dumps(entry | peaks) + "\n")
        events.write(json.dumps({"time": 4.0, "event": "finish", "step": 2}) + "\n")
    return folder


def test_a_run_shows_its_prediction_beside_its_measurement(folder: RunFolder) -> None:
    job = read_run(folder)
    result = measured.compare_run(replace(job, run=replace(job.run, threads=1)))
    assert result is not None and result["clock"] == "cpu_seconds"
    [phase] = result["phases"]
    assert (phase["measured"], phase["ratio"], phase["seconds"]) == (0.625, 0.8, 1.0)
    assert result["memory"]["ratio"] == 0.75
    words = "\n".join(measured.lines(result))
    assert "predicted 0.5 s a step, measured 0.625 CPU s (0.80)" in words
    wall = measured.compare_run(replace(job, run=replace(job.run, threads=2)))
    assert wall is not None and wall["phases"][0]["ratio"] == 0.5
    path, summary = write_report([str(folder.root)], None)
    text = path.read_text()
    check_page(text)
    assert "Predicted and measured" in text and "memory of rank 1" in text
    assert summary["runs"][0]["measured"]["memory"]["predicted"] == 30 * MIB


def test_measured_bytes_stand_beside_the_prediction_of_their_own_phase(folder: RunFolder) -> None:
    """The plan has a longer phase, which needs more memory and was not measured."""
    job = read_run(folder)
    plan = plan_of(job)
    [short] = plan.planned.phases
    both = replace(short, memory=15 * MIB), replace(short, name="long", seq_len=32, memory=30 * MIB)
    more = replace(job, layout_plan=replace(plan, planned=replace(plan.planned, phases=both)))
    result = measured.compare_run(more)
    assert result is not None
    assert (result["memory"]["predicted"], result["memory"]["ratio"]) == (15 * MIB, 15 / 40)
    assert result["memory"]["phases"] == ["synthetic"]
    assert measured.lines(result)[-1].endswith("of tensors (0.38): phase synthetic")


def test_a_run_whose_layout_was_changed_has_no_prediction(folder: RunFolder) -> None:
    job = read_run(folder)
    assert followed_plan(job) == plan_of(job)
    for change in ({"micro_batch_tokens": 64}, {"recompute": "block"}, {"processes": 2}):
        assert followed_plan(replace(job, run=replace(job.run, **change))) is None
    folder.layout.unlink()
    assert measured.compare_run(read_run(folder)) is None
