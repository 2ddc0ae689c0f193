"""Predictions of published runs by the planner, each without the run itself."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks._measured_steps import STEPS, predict
from benchmarks._published_fit import Fit
from benchmarks._published_layouts import Figures, PublishedLayout
from benchmarks._published_runs import Run, load_rows, runs
from headrace.planner.hardware.file import Attained


def select(*names: str) -> list[Run]:
    return [run for run in runs() if run.name in names and run.device == "H100"]


def test_runs_of_each_kind_are_near_with_the_shipped_figures() -> None:
    """Negative control: what the best shapes alone attain."""
    chosen = select("llama2-70b", "8b x8 fsdp", "qwen3-30b x16 pp2 ep8", "nemotron-3-nano x16 ep8")
    fit = Fit("H100", chosen)
    assert len({run.kind for run in chosen}) == 4
    assert max(map(abs, fit.errors)) < 0.15
    alone = Figures(Attained(source="mamf"), traffic=1.0)
    assert all(math.exp(fit.log_error(run, alone)) < 0.9 for run in chosen)


def test_an_asynchronous_program_hides_messages() -> None:
    [waits, runs_beside] = select("8b x64 tp8", "8b x64 tp8 async")
    figures = Fit("H100", []).start
    slow, fast = (PublishedLayout(run, figures).step(figures) for run in (waits, runs_beside))
    assert 1.05 < slow / fast < 1.2  # published: 1.10
    exposed = Figures(replace(figures.attained, exposed=1.0), figures.traffic)
    assert PublishedLayout(runs_beside, exposed).step(exposed) == slow


def test_blackwell_has_figures_of_its_own_and_rows_that_are_refused_by_name() -> None:
    """Negative control: what the best shapes alone attain."""
    names = ("qwen3-30b x8 ep8 B200 4 rows, 26.04.01", "qwen3-30b x8 ep8 GB200 4 rows, 26.08")
    chosen = [run for run in runs() if run.name in names]
    fit = Fit("Blackwell", chosen)
    assert len(chosen) == 2 and max(map(abs, fit.errors)) < 0.15
    alone = Figures(Attained(source="mamf"), traffic=1.0)
    [unfused] = [run for run in chosen if run.device == "B200"]
    assert math.exp(fit.log_error(unfused, alone)) < 0.9
    refused = [row for row in load_rows() if "refused" in row]
    known = {run.name for run in runs()}
    assert refused and not known & {row["run"] for row in refused}
    assert {"NVFP4", "multi-token"} <= {row["refused"].split()[0].rstrip(":") for row in refused}


@pytest.mark.slow
def test_steps_of_a_device_that_no_figure_was_fitted_to() -> None:
    for step in STEPS:
        seconds, size = predict(step)
        assert abs(seconds) < 0.1, step
        assert abs(size) < 0.005, step


@pytest.mark.long
def test_published_runs_are_predicted_within_seven_percent() -> None:
    predictions = [
        p
        for family in ("A100", "H100")
        for p in Fit(family, runs()).predict(lambda run, known_run: known_run is not run)
    ]
    assert len(predictions) == 49
    mean = sum(abs(p.error) for p in predictions) / len(predictions)
    constant = sum(abs(p.constant) for p in predictions) / len(predictions)
    assert mean < 0.07 < 1.5 * mean < constant
    assert max(abs(p.error) for p in predictions) < 0.25
