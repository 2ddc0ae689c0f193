"""Outlier steps and tooltips of runs whose losses are written by hand."""

from __future__ import annotations

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from support.pages.board_runs import write_plan, write_run
from support.pages.written_runs import check_page, drawn_data, make_run, rewrite

from headrace.reports.report import page
from headrace.reports.report.outliers import find_outliers
from headrace.reports.report.reading.candidates import MAX_OUTLIERS, MIN_DISTANCE
from headrace.reports.report.reading.data import RunData
from headrace.trainer.folders.folder import RunFolder

STEPS = 600


def noisy(changes: dict[int, float]) -> list[float | None]:
    draw = random.Random(0)
    return [
        2 + 3 / (1 + step) + draw.gauss(0, 0.05) + changes.get(step, 0) for step in range(STEPS)
    ]


def test_a_noisy_falling_loss_has_no_outlier(tmp_path: Path) -> None:
    run = RunData.load(make_run(tmp_path / "run", noisy({})))
    assert find_outliers(run) == []
    text = page.run_page(run)
    assert "Outlier steps" not in text and drawn_data(text)["runs"][0]["outliers"] == []


def test_an_outlier_names_the_sources_that_caused_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", noisy({300: 1.5, 301: 1.9, 303: 0.9, 450: -2.0}))

    def divide(entry: dict[str, Any]) -> None:
        """Give half of each step to a source whose loss is constant."""
        sources = {"still": {"loss": 2.0, "weight": 32.0, "rows": 2}}
        sources["synthetic"] = {"loss": 2 * entry["loss"] - 2, "weight": 32.0, "rows": 2}
        if entry["step"] == 301:
            entry["grad_norm"] = 40.0
        entry["sources"] = sources

    rewrite(folder.metrics, divide)
    run = RunData.load(folder)
    (result,) = find_outliers(run)
    assert result.step == 301 and result.usual == pytest.approx(2, abs=0.1)
    assert [name for name, *_ in result.risen] == ["synthetic"]
    assert result.entry["grad_norm"] == 40.0 and result.usual_norm == 1.0 and result.events == []
    text = page.run_page(run)
    check_page(text)
    [ring] = drawn_data(text)["runs"][0]["outliers"]
    assert (ring["step"], ring["y"]) == (301, result.entry["loss"])
    assert "Outlier steps" in text
    assert "--step 301 --text" not in text, "synthetic rows have no documents"


def test_the_command_that_shows_an_outlier_can_be_pasted(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "my run", write_plan(tmp_path, 60))
    rewrite(folder / "metrics.jsonl", lambda e: e.update({"loss": 9.0} if e["step"] == 50 else {}))
    text = page.run_page(RunData.load(RunFolder(folder)))
    assert f"mixtures audit &#x27;{folder}&#x27; --step 50 --text" in text


def test_an_outlier_of_a_small_source_is_found(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", noisy({}))

    def add_a_small_one(entry: dict[str, Any]) -> None:
        loss = 1.4 + 0.001 * (entry["step"] % 7) + (3 if entry["step"] == 400 else 0)
        entry["sources"]["small"] = {"loss": loss, "weight": 1.0, "rows": 1}

    rewrite(folder.metrics, add_a_small_one)
    (result,) = find_outliers(RunData.load(folder))
    assert result.step == 400 and result.risen[0] == (
        "small",
        pytest.approx(4.401),
        pytest.approx(1.403),
    )


def test_an_outlier_lists_the_events_before_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", noisy({101: 2.0}))  # a resume is at step 2
    (result,) = find_outliers(RunData.load(folder))
    assert result.events == ["the run was resumed 99 steps before"]


def test_skipped_steps_are_not_outliers(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", noisy({300: 3.0}))
    rewrite(
        folder.metrics,
        lambda e: e.update({"skipped": True, "why": "spike"} if e["step"] == 300 else {}),
    )
    assert find_outliers(RunData.load(folder)) == []


def test_of_many_skipped_steps_the_first_and_last_are_listed(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", noisy({}))
    rewrite(folder.metrics, lambda e: e.update({"skipped": True} if e["step"] >= 300 else {}))
    event = {"time": 4.0, "event": "spike", "what": "a spike", "where": "a row"}
    with folder.events.open("a") as events:
        events.writelines(json.dumps(event | {"step": step}) + "\n" for step in range(300, STEPS))
    text = page.run_page(RunData.load(folder))
    check_page(text)
    listed = [int(step) for step in re.findall(r"<tr><th>(\d+)</th><td>spike", text)]
    assert listed == [*range(300, 310), *range(590, 600)]
    assert "300 of 600 steps" in text and "… 280 more" in text


def test_the_table_keeps_the_largest_outliers(tmp_path: Path) -> None:
    rising = {step + more: 0.1 * step + more for step in range(120, STEPS, 30) for more in (0, 5)}
    result = find_outliers(RunData.load(make_run(tmp_path / "run", noisy(rising))))
    steps = [item.step for item in result]
    assert steps == [step + 5 for step in range(120, STEPS, 30)][-MAX_OUTLIERS:]
    assert all(b - a >= MIN_DISTANCE for a, b in pairwise(steps))
