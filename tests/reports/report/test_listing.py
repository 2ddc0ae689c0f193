from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.pages.written_runs import make_run

from headrace.trainer.checkpoints.store import MANIFEST
from headrace.trainer.cli import main
from headrace.trainer.folders.folder import LOCK


def listed(*places: Path) -> list[dict[str, object]]:
    result = CliRunner().invoke(main, ["list", *map(str, places), "--json"])
    assert result.exit_code == 0, result.output
    runs: list[dict[str, object]] = json.loads(result.stdout)
    return runs


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Runs that ended, were killed, go on, have taken no step, and cannot be read."""
    for name in ("a/finished", "a/killed", "b/going", "b/new", "b/unreadable"):
        make_run(tmp_path / name, [3.0, 2.5, 2.25])
    for name in ("metrics.jsonl", "ledger.jsonl"):
        (tmp_path / "b/new" / name).unlink()
    for name in ("a/killed", "b/going", "b/new"):
        events = tmp_path / name / "events.jsonl"
        events.write_text(events.read_text().splitlines(keepends=True)[0])
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = os.uname().nodename
    (tmp_path / "a/killed" / LOCK).write_text(f"process {ended.pid} on {host}")
    (tmp_path / "b/going" / LOCK).write_text(f"process {os.getpid()} on {host}")
    (tmp_path / "b/new" / LOCK).write_text(f"process {ended.pid} on another")
    (tmp_path / "b/unreadable/model.yaml").write_text("blocks: [")
    saved = tmp_path / "a/finished/checkpoints/step-00000003"
    saved.mkdir()
    (saved / MANIFEST).write_text("{}")
    (tmp_path / "a/notes").mkdir()
    return tmp_path


def test_every_run_below_is_listed_with_its_state(runs: Path) -> None:
    table = {Path(str(run["folder"])).name: run for run in listed(runs / "a", runs / "b")}
    assert {name: run["status"] for name, run in table.items()} == {
        "finished": "finished",
        "killed": "killed",
        "going": "running",
        "new": "running",
        "unreadable": "unreadable",
    }
    finished = table["finished"]
    assert (finished["step"], finished["last_step"], finished["checkpoint"]) == (3, 3, 3)
    assert (finished["loss"], finished["tokens_per_second"]) == (2.25, 640.0)
    assert (table["new"]["step"], table["new"]["loss"]) == (0, None)
    assert "model.yaml" in str(table["unreadable"]["problem"])


def test_a_folder_without_a_manifest_is_no_checkpoint(runs: Path) -> None:
    saved = runs / "a/finished/checkpoints"
    (saved / "step-00000004").mkdir()
    (saved / "step-00000005").mkdir()
    (saved / "step-00000005/state.json").write_text("{}")
    assert [run["checkpoint"] for run in listed(runs / "a/finished")] == [3]
    (saved / "step-00000003" / MANIFEST).unlink()
    assert [run["checkpoint"] for run in listed(runs / "a/finished")] == [None]


def test_a_run_below_two_of_the_folders_is_listed_once(runs: Path) -> None:
    result = listed(runs / "a", runs / "a/finished", runs)
    assert len(result) == 5 and Path(str(result[0]["folder"])).name == "finished"


def test_the_table_has_a_line_for_each_run_and_each_problem(runs: Path) -> None:
    result = CliRunner().invoke(main, ["list", str(runs)])
    lines = result.stdout.splitlines()
    assert len(lines) == 1 + 5 + 1 and lines[0].split()[:3] == ["run", "status", "step"]
    assert "3/3" in lines[1] and "2.2500" in lines[1] and "ago" in lines[1]


def test_settings_that_a_person_wrote_are_no_run(runs: Path) -> None:
    """A recipe's folder, and one above runs, may hold a run.yaml."""
    for folder in (runs, runs / "a/notes"):
        (folder / "run.yaml").write_text("optimizer: {lr: 1e-3}\n")
    names = [Path(str(run["folder"])).name for run in listed(runs)]
    assert names == ["finished", "killed", "going", "new", "unreadable"]
    result = CliRunner().invoke(main, ["report", str(runs / "a/notes")])
    assert result.exit_code == 1 and "there is no run in" in result.output
    result = CliRunner().invoke(main, ["report", str(runs)])
    assert (
        "(5 runs)" in result.output and f"name a run in it: {runs / 'a/finished'}" in result.output
    )


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["list", str(tmp_path / "no")])
    assert result.exit_code == 1 and "there is no folder" in result.output


def test_a_run_without_an_event_has_not_started(runs: Path) -> None:
    (runs / "b/new/events.jsonl").unlink()
    (result,) = listed(runs / "b/new")
    assert result["status"] == "not started"
