"""Runs that change, break or vanish while a board shows them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.pages.board_runs import STEPS

from headrace.console.errors import StorageError
from headrace.dataplane.storage import storage
from headrace.reports.board import runs as board_runs
from headrace.reports.report import listing


def test_a_run_with_a_broken_file_leaves_the_others(open_board: Any, runs: Path) -> None:
    (runs / "other/model.yaml").write_text("pattern: [")
    client = open_board(runs)
    result = {run["name"]: run for run in client.json("api/runs")["runs"]}
    assert "model.yaml" in result["other"]["problem"] and result["base"]["problem"] is None
    assert result["other"]["step"] == 12, "its curves can be read"
    settings = client.json("api/settings")
    assert settings[result["other"]["id"]] == {} and settings[result["base"]["id"]]["seed"] == 3


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("events.jsonl", '{"time": 1, "event": bad\n', "1 invalid line, the first is line 1"),
        ("events.jsonl", "[1]\n5\n", "2 invalid lines, the first is line 1"),
        ("events.jsonl", '{"event": "start"}\n', "1 invalid line"),
        ("scores.jsonl", "garbage\n", "1 invalid line"),
        ("metrics.jsonl", '{"tokens": 1, "loss": 2.5}\n', "lines without step"),
        ("plan.json", '{"phases": []}', "is damaged"),
        ("plan.json", '{"phases', "is damaged"),
    ],
)
def test_a_damaged_file_leaves_the_other_runs(
    open_board: Any, runs: Path, name: str, text: str, problem: str
) -> None:
    """The damaged run is the first that is read."""
    shutil.copytree(runs / "base", runs / "a")
    (runs / "a" / name).write_text(text)
    client = open_board(runs)
    result = {run["name"]: run for run in client.json("api/runs")["runs"]}
    assert name in result["a"]["problem"] and problem in result["a"]["problem"]
    for undamaged, entries in (("base", STEPS), ("other", 12)):
        assert (result[undamaged]["entries"], result[undamaged]["problem"]) == (entries, None)
    shutil.copy(runs / "base/events.jsonl", runs / "a" / name)  # whole again, with other lines
    if name == "events.jsonl":
        client.board.refresh()
        result = {run["name"]: run for run in client.json("api/runs")["runs"]}
        assert result["a"]["problem"] is None and result["a"]["status"] == "finished"


def test_a_damaged_plan_is_named_beside_the_mixture(open_board: Any, runs: Path) -> None:
    (runs / "base/plan.json").write_text('{"phases')
    client = open_board(runs)
    result = {name: client.json(f"api/run/{id}") for name, id in client.ids().items()}
    assert result["base"]["plan"] is None and result["other"]["plan_problem"] is None
    assert "base/plan.json is damaged" in result["base"]["plan_problem"]


def test_a_changed_digit_of_a_plan_is_named(open_board: Any, runs: Path) -> None:
    plan = runs / "base/plan.json"
    plan.write_text(plan.read_text().replace('"seed": ', '"seed": 1', 1))
    client = open_board(runs)
    result = client.json(f"api/run/{client.ids()['base']}")
    assert result["plan"] is None
    assert "base/plan.json is damaged" in result["plan_problem"]


def test_a_run_that_is_deleted_stays_deleted(open_board: Any, runs: Path) -> None:
    client = open_board(runs)
    shutil.rmtree(runs / "other")
    client.board.refresh()
    assert not (runs / "other").exists()
    result = {run["name"]: run["entries"] for run in client.json("api/runs")["runs"]}
    assert result == {"base": STEPS, "other": 0}
    client.board.scan()
    assert list(client.ids()) == ["base"]


def test_levels_that_are_deleted_are_made_again(open_board: Any, runs: Path) -> None:
    client = open_board(runs)
    shutil.rmtree(runs / "base/board")
    client.board.refresh()
    [part] = client.curves(run=client.ids()["base"], curve="loss", width=100)
    assert len(part["x"]) == STEPS and (runs / "base/board").is_dir()


def test_settings_that_a_start_changed_are_shown(open_board: Any, runs: Path) -> None:
    client = open_board(runs)
    id = client.ids()["base"]
    versions = {run["id"]: run["version"] for run in client.json("api/runs")["runs"]}
    text = (runs / "base/run.yaml").read_text()
    (runs / "base/run.yaml").write_text(text.replace("processes: 4", "processes: 8"))
    client.board.refresh()
    assert client.json("api/settings")[id]["processes"] == 8
    changed = {
        run["id"]
        for run in client.json("api/runs")["runs"]
        if run["version"] != versions[run["id"]]
    }
    assert changed == {id}, "the page asks again when the version changes"


def test_levels_that_another_user_made_are_left_alone(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run = board_runs.BoardRun(str(runs / "base"))
    list(run.refresh())
    assert (runs / "base/board").is_dir()
    usual = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: usual(path, mode) and Path(path).name != "board"
    )
    list((run := board_runs.BoardRun(str(runs / "base"))).refresh())
    assert run.metrics.index.entries == STEPS and run.problem is None
    assert run.metrics.folder.is_relative_to(tmp_path / "cache")


def test_what_cannot_be_written_is_a_problem_of_its_run(open_board: Any, runs: Path) -> None:
    (runs / "base/board").write_text("a file where the levels should be")
    client = open_board(runs)
    result = {run["name"]: run for run in client.json("api/runs")["runs"]}
    assert "base/board" in result["base"]["problem"] and result["other"]["problem"] is None
    assert json.dumps(result["other"]["range"]["step"]) == "[0.0, 11.0]"


def test_folders_that_are_private_are_left_out(
    open_board: Any, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (runs / "private").mkdir()
    usual, usual_stat = Path.iterdir, Path.stat

    def refuse(path: Path) -> None:
        if path.name == "private" or path.parent.name == "private":
            raise PermissionError(13, "Permission denied", str(path))

    def iterdir(path: Path) -> Any:
        refuse(path)
        return usual(path)

    def stat(path: Path, **more: Any) -> Any:
        if path.parent.name == "private":
            refuse(path)
        return usual_stat(path, **more)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    monkeypatch.setattr(Path, "stat", stat)
    assert sorted(open_board(runs).ids()) == ["base", "other"]
    assert [run.root.name for run in listing.find_runs([str(runs)])] == ["base", "other"]


def test_a_file_that_cannot_be_read_for_a_while_is_read_later(
    open_board: Any, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = storage.read

    def read(url: str, *place: int) -> bytes:
        if url.endswith(("events.jsonl", "run.yaml", "plan.json")):
            raise StorageError(f"cannot read {url}: no answer")
        return usual(url, *place)

    monkeypatch.setattr(storage, "read", read)
    client = open_board(runs / "base")
    client.board.refresh()
    [run] = client.json("api/runs")["runs"]
    assert run["status"] == "not started" and run["entries"] == STEPS
    assert all(name in run["problem"] for name in ("events.jsonl", "run.yaml", "plan.json"))
    monkeypatch.setattr(storage, "read", usual)
    client.board.refresh()
    [run] = client.json("api/runs")["runs"]
    assert run["status"] == "finished" and run["problem"] is None and len(run["phases"]) == 2
    assert client.json("api/settings")[run["id"]]["seed"] == 3
    client.board.refresh()
    assert client.json("api/runs")["runs"][0]["version"] == run["version"]


def test_a_checkpoint_without_its_tensors_is_not_whole(open_board: Any, runs: Path) -> None:
    client = open_board(runs / "base")
    file = runs / "base/checkpoints/step-00000010/tensors/0"

    def problem() -> Any:
        [result] = client.json(f"api/run/{client.ids()['base']}")["checkpoints"]
        return result.get("problem")

    assert problem() is None
    size = file.stat().st_size
    file.write_bytes(b"cut off")
    assert problem().endswith(f"tensors/0 has 7 of {size} bytes")
    file.unlink()
    assert problem().endswith("tensors/0 is missing")
