"""Reports of runs whose files are written by hand, so that every number is known."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from support.pages.board_runs import write_scores
from support.pages.written_runs import check_page, curve, drawn_data, make_run, rewrite

from headrace.console.errors import IntegrityError, RunError
from headrace.console.html.chart import bounds, ticks
from headrace.reports.report.reading.data import RunData, realised_shares
from headrace.reports.report.reading.totals import STRIPS
from headrace.reports.report.write import write_report
from headrace.trainer.cli import main
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.loop.metrics import METRICS, Metric
from headrace.trainer.run.stored import read_run


def test_a_report_shows_the_run_in_one_file(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "ocean & <river>", [4.0, 3.0, 2.0, 1.0])
    path, summary = write_report([str(folder.root)], None)
    text = path.read_text()
    check_page(text)
    assert "ocean &amp; &lt;river&gt;" in text
    for word in ("finished", "ledger3", read_run(folder).plan.hash, "1 restart", "25.00%"):
        assert word in text, word
    (run,) = summary["runs"]
    assert (run["steps"], run["tokens"], run["loss"]) == (4, 256, 1.0)
    assert run["tokens_per_second"] == pytest.approx(640.0) and run["data_wait"] == 0.25


def test_tables_of_profiles_are_in_the_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [2.0, 1.0])
    assert "<h2>Profile" not in write_report([str(folder.root)])[0].read_text()
    folder.profiles.mkdir()
    for rank in (0, 1):
        table = f"rank {rank}\n 0.40  aten::mm: cutlass<{rank}>\n"
        (folder.profiles / f"steps-3-5.rank-{rank}.txt").write_text(table)
    text = write_report([str(folder.root)])[0].read_text()
    check_page(text)
    assert "<h2>Profile" in text and "rank 0\n 0.40  aten::mm: cutlass&lt;0&gt;" in text
    assert "rank 1" not in text


def test_a_damaged_ledger_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_run(tmp_path / "run", [4.0, 3.0, 2.0, 1.0])
    lines = folder.ledger.read_text().splitlines(keepends=True)
    folder.ledger.write_text("".join(lines[:1] + lines[2:]))
    path, summary = write_report([str(folder.root)], None)
    for text in (path.read_text(), caplog.text, summary["runs"][0]["ledger_damage"]):
        assert "has no line between those of step 0 and step 2" in text


def test_a_restart_is_marked_at_the_tokens_before_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [4.0, 3.0, 2.0, 1.0])
    [run] = drawn_data(write_report([str(folder.root)])[0].read_text())["runs"]
    hours = 3 * 0.1 / 3600
    expected = {"kind": "resume", "step": 2, "tokens": 128.0, "hours": pytest.approx(hours)}
    assert run["marks"] == [expected]


def test_losses_that_are_not_finite_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [4.0, None, None, None])
    text = write_report([str(folder.root)], None)[0].read_text()
    check_page(text)
    assert "not finite" in text


def test_several_runs_are_compared(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, losses) for name, losses in
            (("a", [4.0, 3.0, 2.0]), ("b", [4.0, 2.5, 1.5, 1.0]))]  # fmt: skip
    path, summary = write_report([str(run.root) for run in runs], None)
    text = path.read_text()
    check_page(text)
    assert path.name == "compare.html" and len(summary["runs"]) == 2
    data = drawn_data(text)
    [panel] = [metric for metric in data["metrics"] if metric["name"] == "difference"]
    assert panel["title"] == "Loss minus the loss of a"
    [difference] = [part for part in data["parts"] if "difference" in part["curves"]]
    assert difference["run"] == "b" and curve(difference, "difference")[:3] == [0, -0.5, -0.5]


def test_memory_is_drawn_where_a_device_counts_it(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [4.0, 3.0, 2.0])
    page = write_report([str(folder.root)], None)[0].read_text()
    assert not {"memory", "mfu"} & set(drawn_data(page)["runs"][0]["series"]), "nothing to show"
    rewrite(folder.metrics, lambda entry: entry.update(memory=(1 + entry["step"]) << 30))
    page, summary = write_report([str(folder.root)], None)
    data = drawn_data(page.read_text())
    assert "memory" in data["runs"][0]["series"] and summary["runs"][0]["memory"] == 3 << 30
    assert curve(data["parts"][0], "memory") == [float(number << 30) for number in (1, 2, 3)]


def test_a_line_of_the_table_of_metrics_is_a_panel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METRICS, "dummy", Metric(title="Dummies", wide=True))
    folder = make_run(tmp_path / "run", [4.0, 3.0, 2.0])
    rewrite(folder.metrics, lambda entry: entry.update(dummy=entry["step"] / 4, slowest_rank=3))
    data = drawn_data(write_report([str(folder.root)], None)[0].read_text())
    assert {"name": "dummy", "title": "Dummies", "wide": True} in data["metrics"]
    assert curve(data["parts"][0], "dummy") == [0.0, 0.25, 0.5]
    assert "slowest_rank" not in data["runs"][0]["series"], "the table gives it no title"


def test_a_comparison_has_norms_sources_and_settings_that_differ(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, [4.0, 3.0, 2.0]) for name in "ab"]
    text = runs[1].run.read_text()
    runs[1].run.write_text(text.replace("seed: 1\n", "seed: 5\n"))
    assert runs[1].run.read_text() != text
    page = write_report([str(run.root) for run in runs], None)[0].read_text()
    check_page(page)
    assert all("grad_norm" in run["series"] for run in drawn_data(page)["runs"])
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
    plain = write_report([str(folder.root)])[0].read_text()
    assert drawn_data(plain)["runs"][0]["held_out"] == [] and "Skipped steps" not in plain
    evaluate(folder, {1: 3.5, 3: 2.25})
    rewrite(folder.metrics, lambda e: e.update(SKIPPED if e["step"] == 2 else {}))
    with folder.events.open("a") as events:
        for step in (2, 3):  # step 3 was run again after a resume, and was applied
            skipped = {"event": "spike", "step": step, "what": "step 2: a spike above 5"}
            more = {"time": 4.0, "where": "rows 8 to 11, phase <one>", "back_to": 0}
            events.write(json.dumps({**skipped, **more}) + "\n")
    path, summary = write_report([str(folder.root)])
    text = path.read_text()
    check_page(text)
    for word in ("rows 8 to 11, phase &lt;one&gt;", "rolled back to step 0"):
        assert word in text, word
    held_out = drawn_data(text)["parts"][1]
    assert curve(held_out, "held-out/loss/web") == [2.5, 1.25]
    (run,) = summary["runs"]
    assert (run["held_out"], run["left_out"]) == (2.25, [2])


def test_scores_and_memory_of_several_runs_stand_beside_each_other(tmp_path: Path) -> None:
    first, second, third = (make_run(tmp_path / name, [4.0, 3.0]) for name in "abc")
    write_scores(first.root, {1: 0.5, 2: 0.625})
    write_scores(second.root, {2: 0.25})
    text = write_report([str(run.root) for run in (first, second, third)])[0].read_text()
    check_page(text)
    step = " <em>step 2</em>"
    assert f"<td>0.6250 ± 0.01{step}</td><td>0.2500 ± 0.01{step}</td><td>–</td>" in text
    assert "arc &lt;easy&gt;" in text and f"<td>75.00%{step}</td>" in text
    with first.events.open("a") as events:
        event = {"time": 3.0, "event": "memory", "step": 1, "memory": [10**9, 2 * 10**9]}
        events.write(json.dumps(event) + "\n")
    page = write_report([str(first.root)])[0].read_text()
    assert "rank 0 1 GB, rank 1 2 GB" in page


def test_slow_ranks_are_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [4.0, 3.0, 2.0])
    plain = write_report([str(folder.root)])[0].read_text()
    assert "slowest_lag" not in drawn_data(plain)["runs"][0]["series"] and "Slow ranks" not in plain
    rewrite(folder.metrics, lambda entry: entry.update(slowest_rank=3, slowest_lag=0.25))
    with folder.events.open("a") as events:
        message = "rank 3 is slow: since step 0"
        events.write(
            json.dumps({"event": "straggler", "step": 2, "time": 4.0, "what": message}) + "\n"
        )
    text = write_report([str(folder.root)])[0].read_text()
    check_page(text)
    assert "slowest_lag" in drawn_data(text)["runs"][0]["series"]
    assert f"<tr><th>2</th><td>{message}</td></tr>" in text


def test_signals_of_few_steps_are_curves(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [4.0, 3.0, 2.0])
    assert not RunData.load(folder).signals_table.curves
    entries = [
        {
            "step": step,
            "tokens": 64 * (step + 1),
            "layers": {"blocks.0": {"weight_norm": 5.0 + step}},
        }
        for step in (0, 2)
    ]
    folder.signals.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    table = RunData.load(folder).signals_table
    assert table.step.tolist() == [0, 2] and (np.diff(table.hours) > 0).all()
    assert table.mean("weight_norm/blocks.0").tolist() == [5.0, 7.0]
    text = write_report([str(folder.root)])[0].read_text()
    check_page(text)
    assert '"weight_norm/blocks.0"' in text


def test_the_error_of_a_failed_run_is_shown(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [4.0])
    with folder.events.open("a") as events:
        error = "rank 1 <died>\n  where: step 1"
        events.write(json.dumps({"time": 4.0, "event": "fail", "step": 1, "error": error}) + "\n")
    text = write_report([str(folder.root)])[0].read_text()
    check_page(text)
    assert "<pre>rank 1 &lt;died&gt;\n  where: step 1</pre>" in text


def test_a_comparison_names_the_first_step_with_other_rows(tmp_path: Path) -> None:
    first, second, third = (make_run(tmp_path / name, [4.0, 3.0, 2.0]) for name in "abc")
    evaluate(first, {2: 3.0})
    evaluate(third, {2: 4.0})
    rewrite(third.ledger, lambda e: e.update({"hash": "other"} if e["step"] >= 1 else {}))
    path, summary = write_report([str(item.root) for item in (first, second, third)])
    text = path.read_text()
    check_page(text)
    assert "the same" in text and "differ from step 1 on" in text
    drawn = [run["held_out"] for run in drawn_data(text)["runs"]]
    assert drawn == [["loss", "loss/code", "loss/web"], [], ["loss", "loss/code", "loss/web"]]
    assert [run.get("first_difference") for run in summary["runs"]] == [None, None, 1]


def test_each_run_has_its_report_unless_compare_is_set(tmp_path: Path) -> None:
    roots = [str(make_run(tmp_path / name, [2.0, 1.0]).root) for name in "ab"]
    done = CliRunner().invoke(main, ["report", *roots, "--json"])
    assert [Path(load["report"]).name for load in json.loads(done.stdout)] == ["report.html"] * 2
    done = CliRunner().invoke(main, ["report", *roots, "--compare", "--json"])
    assert Path(json.loads(done.stdout)["report"]).name == "compare.html"
    for words in (["report", roots[0], "--compare"], ["report", *roots, "--out", "x.html"]):
        assert CliRunner().invoke(main, words).exit_code == 2


def test_a_run_without_a_step_has_no_report(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [1.0])
    folder.metrics.write_text("")
    with pytest.raises(RunError, match="has not taken a step"):
        write_report([str(folder.root)], None)


def test_an_invalid_line_of_the_metrics_is_named(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [4.0, 3.0, 2.0, 1.0])
    lines = folder.metrics.read_bytes().splitlines(keepends=True)
    folder.metrics.write_bytes(b"".join([*lines[:2], b"\0\0\n", lines[3]]))
    with pytest.raises(IntegrityError, match=r"line 3 of .*metrics\.jsonl is invalid"):
        write_report([str(folder.root)])


def test_facts_that_were_damaged_are_counted_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [2.0, 1.0])
    write_report([str(folder.root)])
    facts = folder.about.read_bytes()
    folder.about.write_text("{")
    write_report([str(folder.root)])
    assert json.loads(folder.about.read_bytes()) == json.loads(facts)


def test_realised_shares_sum_to_one(tmp_path: Path) -> None:
    steps = 2 * STRIPS + 3
    run = RunData.load(make_run(tmp_path / "run", [1.0] * steps))
    pieces = list(realised_shares(run))
    ends = [*range(192, 64 * steps, 192), 64 * steps]
    assert [(begin, end) for begin, end, _ in pieces] == list(pairwise([0, *ends]))
    assert all(sum(shares) == 1 for *_, shares in pieces)


def test_scales() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    low, high = bounds([1.0, 2.0])
    assert low < 1 and high > 2 and bounds([]) == (0.0, 1.0)
