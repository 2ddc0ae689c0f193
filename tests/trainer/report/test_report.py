"""Reports of runs whose files are written by hand, so that every number is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from written_runs import check_page, make_run, rewrite

from headrace.console.errors import RunError
from headrace.trainer import report
from headrace.trainer.cli import main
from headrace.trainer.drawing.chart import Curve, bounds, most, ticks
from headrace.trainer.folder import RunFolder
from headrace.trainer.report.data import (
    RunData,
    extremes,
    realised_over_tokens,
    smooth,
    thin,
)
from headrace.trainer.run.stored import read_run


def test_a_report_shows_the_run_in_one_file(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "ocean & <river>", [4.0, 3.0, 2.0, 1.0])
    path, summary = report.write([str(folder.root)], None)
    text = path.read_text()
    check_page(text)
    assert "ocean &amp; &lt;river&gt;" in text
    for word in ("finished", "ledger3", read_run(folder).plan.hash, "1 restart", "25.00%"):
        assert word in text, word
    (run,) = summary["runs"]
    assert (run["steps"], run["tokens"], run["loss"]) == (4, 256, 1.0)
    assert run["tokens_per_second"] == pytest.approx(640.0) and run["data_wait"] == 0.25


def test_a_restart_is_marked_at_the_tokens_before_it(tmp_path: Path) -> None:
    run = RunData.load(make_run(tmp_path / "run", [4.0, 3.0, 2.0, 1.0]))
    assert run.restarts == [128.0]


def test_losses_that_are_not_finite_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [4.0, None, None, None])
    text = report.write([str(folder.root)], None)[0].read_text()
    check_page(text)
    assert "not finite" in text


def test_several_runs_are_compared(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, losses) for name, losses in
            (("a", [4.0, 3.0, 2.0]), ("b", [4.0, 2.5, 1.5, 1.0]))]  # fmt: skip
    path, summary = report.write([str(run.root) for run in runs], None)
    text = path.read_text()
    check_page(text)
    assert path.name == "compare.html" and len(summary["runs"]) == 2
    assert "Loss minus the loss of a" in text


def test_memory_and_the_speed_of_each_source_are_drawn(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [4.0, 3.0, 2.0])
    page = report.write([str(folder.root)], None)[0].read_text()
    assert "Memory" not in page and "per second by source" not in page, "nothing to show"
    rewrite(folder.metrics, lambda entry: entry.update(memory=(1 + entry["step"]) << 30))
    page, summary = report.write([str(folder.root)], None)
    check_page(page.read_text())
    assert "Memory" in page.read_text() and summary["runs"][0]["memory"] == 3 << 30

    def mixed(entry: dict[str, Any]) -> None:
        one = entry["sources"].pop("synthetic")
        entry["sources"] = {"web": {**one, "rows": 3}, "code": {**one, "rows": 1}}

    rewrite(folder.metrics, mixed)
    run = RunData.load(folder)
    assert run.source_speed("web").y == [480.0] * 3 and run.source_speed("code").y == [160.0] * 3


def test_a_comparison_has_norms_sources_and_settings_that_differ(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, [4.0, 3.0, 2.0]) for name in "ab"]
    text = runs[1].run.read_text()
    runs[1].run.write_text(text.replace("seed: 1\n", "seed: 5\n"))
    assert runs[1].run.read_text() != text
    page = report.write([str(run.root) for run in runs], None)[0].read_text()
    check_page(page)
    assert "Gradient norm" in page and "Loss of" not in page, "one source needs no chart of its own"
    assert "<th>seed</th><td>1</td><td>5</td>" in page
    assert "<th>synthetic.steps</th>" not in page, "equal settings are left out"


def evaluate(folder: RunFolder, losses: dict[int, float]) -> None:
    lines = [
        {
            "step": step,
            "tokens": 64 * (step + 1),
            "loss": loss,
            "sources": {"web": {"loss": loss - 1}, "code": {"loss": loss + 1}},
        }
        for step, loss in losses.items()
    ]
    folder.evaluations.write_text("".join(json.dumps(line) + "\n" for line in lines))


SKIPPED = {"skipped": True, "why": "spike"}


def test_held_out_losses_and_skipped_steps_are_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [4.0, 3.0, 9.0, 1.0])
    plain = report.write([str(folder.root)])[0].read_text()
    assert "Held-out loss" not in plain and "Skipped steps" not in plain
    evaluate(folder, {1: 3.5, 3: 2.25})
    rewrite(folder.metrics, lambda e: e.update(SKIPPED if e["step"] == 2 else {}))
    with folder.events.open("a") as events:
        for step in (2, 3):  # step 3 was run again after a resume, and was applied
            skipped = {"event": "spike", "step": step, "what": "step 2: a spike above 5"}
            more = {"time": 4.0, "where": "rows 8 to 11, phase <one>", "back_to": 0}
            events.write(json.dumps({**skipped, **more}) + "\n")
    path, summary = report.write([str(folder.root)])
    text = path.read_text()
    check_page(text)
    for word in (
        "Held-out loss",
        "1.2500",
        "rows 8 to 11, phase &lt;one&gt;",
        "rolled back to step 0",
    ):
        assert word in text, word
    (run,) = summary["runs"]
    assert (run["held_out"], run["left_out"]) == (2.25, [2])


def test_slow_ranks_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [4.0, 3.0, 2.0])
    plain = report.write([str(folder.root)])[0].read_text()
    assert "Slowest rank" not in plain and "Slow ranks" not in plain
    rewrite(folder.metrics, lambda entry: entry.update(slowest_rank=3, slowest_lag=0.25))
    with folder.events.open("a") as events:
        what = "rank 3 is slow: since step 0"
        events.write(
            json.dumps({"event": "straggler", "step": 2, "time": 4.0, "what": what}) + "\n"
        )
    text = report.write([str(folder.root)])[0].read_text()
    check_page(text)
    assert "Slowest rank" in text and f"<tr><th>2</th><td>{what}</td></tr>" in text


def test_the_error_of_a_failed_run_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [4.0])
    with folder.events.open("a") as events:
        error = "rank 1 <died>\n  where: step 1"
        events.write(json.dumps({"time": 4.0, "event": "fail", "step": 1, "error": error}) + "\n")
    text = report.write([str(folder.root)])[0].read_text()
    check_page(text)
    assert "<pre>rank 1 &lt;died&gt;\n  where: step 1</pre>" in text


def test_a_comparison_names_the_first_step_with_other_rows(tmp_path: Path) -> None:
    first, second, third = (make_run(tmp_path / name, [4.0, 3.0, 2.0]) for name in "abc")
    evaluate(first, {2: 3.0})
    evaluate(third, {2: 4.0})
    rewrite(third.ledger, lambda e: e.update({"hash": "other"} if e["step"] >= 1 else {}))
    path, summary = report.write([str(each.root) for each in (first, second, third)])
    text = path.read_text()
    check_page(text)
    assert "the same" in text and "differ from step 1 on" in text and "Held-out loss" in text
    assert [run.get("first_difference") for run in summary["runs"]] == [None, None, 1]


def test_each_run_has_its_report_unless_compare_is_set(tmp_path: Path) -> None:
    roots = [str(make_run(tmp_path / name, [2.0, 1.0]).root) for name in "ab"]
    done = CliRunner().invoke(main, ["report", *roots, "--json"])
    assert [Path(each["report"]).name for each in json.loads(done.stdout)] == ["report.html"] * 2
    done = CliRunner().invoke(main, ["report", *roots, "--compare", "--json"])
    assert Path(json.loads(done.stdout)["report"]).name == "compare.html"
    for words in (["report", roots[0], "--compare"], ["report", *roots, "--out", "x.html"]):
        assert CliRunner().invoke(main, words).exit_code == 2


def test_a_run_without_a_step_has_no_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0])
    folder.metrics.write_text("")
    with pytest.raises(RunError, match="has not taken a step"):
        report.write([str(folder.root)], None)


def test_realised_shares_sum_to_one(tmp_path: Path) -> None:
    run = RunData.load(make_run(tmp_path / "run", [1.0] * 10))
    pieces = realised_over_tokens(run, bins=4)
    assert [(begin, end) for begin, end, _ in pieces] == [
        (0, 192), (192, 384), (384, 576), (576, 640)
    ]  # fmt: skip
    assert all(sum(shares) == 1 for *_, shares in pieces)


def test_curves() -> None:
    spiked = Curve([float(x) for x in range(1000)], [2.0] * 700 + [9.0] + [2.0] * 299)
    curve = thin(spiked)
    assert len(curve.x) == 500 and set(curve.y) == {2.0, 5.5} and curve.x[0] == 0.5
    assert max(extremes(spiked).y) == 9.0 and extremes(spiked).x[extremes(spiked).y.index(9)] == 700
    assert smooth(Curve([0, 1, 2], [0.0, 3.0, 6.0]), 3).y == [1.5, 3.0, 4.5]
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert most([9.0, *[1.0] * 99]) == 1.0 and most([9.0, 1.0]) == 9.0
    low, high = bounds([1.0, 2.0])
    assert low < 1 and high > 2 and bounds([]) == (0.0, 1.0)
