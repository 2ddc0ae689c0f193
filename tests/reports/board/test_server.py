"""The board's server, asked as the page asks it; every answer is compared with the run's files."""

from __future__ import annotations

import json
import shutil
import socket
import struct
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import fsspec
import numpy as np
import pytest
from click.testing import CliRunner
from support.pages.board_runs import BATCH, LENGTH, SIGNALS_EVERY, STEPS, signals, write_scores

from headrace.console.errors import StorageError
from headrace.dataplane.order.plan import Plan
from headrace.dataplane.runlog import writer
from headrace.dataplane.runlog.document_losses import PieceLoss, encode_step
from headrace.dataplane.runlog.writer import encode_line
from headrace.dataplane.storage import storage
from headrace.reports.board import serve
from headrace.trainer.cli import main


def lines(file: Path) -> list[dict[str, Any]]:
    return list(writer.read(file))


# Requests that are answered, and refused


def test_only_the_token_and_this_machines_name_are_answered(open_board: Any, runs: Path) -> None:
    client = open_board(runs)
    root = client.server.url.rsplit("/", 2)[0]
    assert b"board.js" in client.bytes("")
    for url in (root, f"{root}/", f"{root}/wrong/", f"{root}/wrong/api/runs", f"{root}/%ff/"):
        client.refused(url, 403)
    client.refused(client.server.url, 403, Host="evil.example:8688")
    client.refused(client.server.url, 403, Host="127.0.0.1.evil.example")
    for host in ("localhost:9999", "127.0.0.1:1", "localhost", "[::1]:8688"):
        urlopen(Request(client.server.url, headers={"Host": host})).close()
    assert client.server.server_address[0] == "127.0.0.1"


def test_a_browser_that_closes_its_connection_prints_nothing(
    open_board: Any, runs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    client = open_board(runs)
    for said in (b"", b"GET /", b"GET / HTTP/1.1\r\n\r\n"):
        connection = socket.create_connection(client.server.server_address)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.sendall(said)
        connection.close()  # by a reset
    client.json("api/runs")
    client.server.shutdown()
    client.server.server_close()
    assert capfd.readouterr() == ("", "")


def test_what_is_no_file_of_a_run_is_refused(open_board: Any, runs: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("a private key")
    (runs / "base/secret.yaml").write_text("beside the run")
    (runs / "base/mixture.yaml").unlink()
    (runs / "base/mixture.yaml").symlink_to(tmp_path / "secret")
    client = open_board(runs)
    id = client.ids()["base"]
    assert client.bytes(f"file/{id}/run.yaml") == (runs / "base/run.yaml").read_bytes()
    client.refused(f"{client.server.url}file/{id}/mixture.yaml", 403)
    for path in (
        f"file/{id}/secret.yaml",
        f"file/{id}/../secret",
        f"file/{id}/..%2Fsecret",
        f"file/{id}/%2Fetc%2Fpasswd",
        f"file/{id}/checkpoints",
        f"file/{id}/layout.yaml",
        "file/0123456789ab/run.yaml",
        "../server.py",
        "%2e%2e/server.py",
        "server.py",
        "static/board.js",
        "api/run/..",
        f"api/step/{id}/-1",
    ):
        client.refused(client.server.url + path, 404)
    for words in ("axis=time", "width=wide", "low=a", "width=inf", "width=nan", "width=-1"):
        client.refused(f"{client.server.url}api/curves?{words}", 400)
    for path in (f"nearest/{id}?first=inf", f"nearest/{id}?last=1e999", f"step/{id}/7?first=a"):
        client.refused(f"{client.server.url}api/{path}", 400)


# What is answered


def test_runs_are_listed_with_their_state_and_settings(open_board: Any, runs: Path) -> None:
    client = open_board(runs)
    listed = {run["name"]: run for run in client.json("api/runs")["runs"]}
    base, running = listed["base"], listed["other"]
    assert (base["status"], running["status"]) == ("finished", "running")
    assert (base["step"], base["last_step"], running["step"]) == (STEPS, STEPS, 12)
    assert base["loss"] == lines(runs / "base/metrics.jsonl")[-1]["loss"]
    assert {"loss", "loss/web", "rows/code", "mfu", "memory"} <= set(base["series"])
    assert [phase["name"] for phase in base["phases"]] == ["stable", "anneal"]
    assert running["phases"][1]["step"] == 10 and running["phases"][1]["tokens"] is not None
    assert [(mark["kind"], mark["step"]) for mark in base["marks"]] == [("resume", 5)]
    settings = client.json("api/settings")
    result = [settings[run["id"]]["optimizer.lr"] for run in (base, running)]
    assert result == [1e-3, 2e-3] and settings[base["id"]]["model.width"] == 64


@pytest.mark.parametrize("log", [0, 1])
@pytest.mark.parametrize("axis", ["step", "tokens", "hours"])
def test_curves_are_those_of_the_lines(open_board: Any, runs: Path, axis: str, log: int) -> None:
    client = open_board(runs)
    ids = client.ids()
    names = ["loss", "loss/web", "held-out/loss", "held-out/loss/code", "no such curve"]
    parts = client.curves(run=list(ids.values()), curve=names, axis=axis, width=1000, log=log)
    assert [part["run"] for part in parts] == [ids["base"]] * 2 + [ids["other"]] * 2
    for name, part in zip(("base", "base", "other", "other"), parts, strict=True):
        held = "held-out/loss" in part["values"]
        entries = lines(runs / name / ("evaluations.jsonl" if held else "metrics.jsonl"))
        x = {
            "step": [entry["step"] for entry in entries],
            "tokens": [entry["tokens"] for entry in entries],
            "hours": [0.25 * (entry["step"] + 1) / 3600 for entry in entries],
        }
        assert np.allclose(part["x"], x[axis], rtol=1e-9)
        assert part["first"].tolist() == part["last"].tolist() == x["step"]
        for curve, values in part["values"].items():
            expected = [
                entry["sources"].get(curve.split("/")[-1], {}).get("loss", np.nan)
                if curve.endswith(("web", "code"))
                else entry["loss"]
                for entry in entries
            ]
            assert np.allclose(values, np.array(expected), rtol=1e-6, equal_nan=True)


@pytest.mark.parametrize("axis", ["step", "hours"])
def test_signals_of_few_steps_are_curves_too(open_board: Any, runs: Path, axis: str) -> None:
    client = open_board(runs)
    id = client.ids()["base"]
    names = ["loss", "activation_rms/blocks.2", "expert_max/blocks.1"]
    every, few = client.curves(run=id, curve=names, axis=axis, width=1000)
    assert list(every["values"]) == ["loss"] and len(every["x"]) == STEPS
    steps = list(range(0, STEPS, SIGNALS_EVERY))
    assert few["first"].tolist() == few["last"].tolist() == steps
    x = {"step": steps, "hours": [0.25 * (step + 1) / 3600 for step in steps]}
    assert np.allclose(few["x"], x[axis], rtol=1e-9)
    for name, values in few["values"].items():
        kind, layer = name.split("/blocks.")
        assert np.allclose(values, [signals(step, int(layer))[kind] for step in steps])
    near = {"curve": names[1], "first": 0, "last": steps[-1], "value": 3.65}
    assert client.json(f"api/nearest/{id}", **near) == {"step": 6}


def test_few_buckets_show_the_spike_and_a_click_finds_its_step(open_board: Any, runs: Path) -> None:
    client = open_board(runs)
    id = client.ids()["base"]
    for width, log in ((2, 0), (2, 1), (4, 1), (7, 1)):
        [part] = client.curves(run=id, curve="loss", axis="step", width=width, log=log)
        entries = lines(runs / "base/metrics.jsonl")
        assert len(part["x"]) < 12
        _, low, high = part["values"]["loss"]
        expected = [entry["loss"] for entry in entries]
        assert high.max() == np.float32(max(expected)) and low.min() == np.float32(min(expected))
        assert part["first"][0] == 0 and part["last"][-1] == STEPS - 1
        assert (np.diff(part["last"]) > 0).all() and (np.diff(part["x"]) > 0).all()
        for number, (first, last) in enumerate(zip(part["first"], part["last"], strict=True)):
            bucket = expected[int(first) : int(last) + 1]
            result = [item[number] for item in part["values"]["loss"]]
            assert result == pytest.approx([np.mean(bucket), min(bucket), max(bucket)], rel=1e-6)
    near = {"curve": "loss", "first": 2, "last": 15, "value": expected[7] + 0.1}
    assert client.json(f"api/nearest/{id}", **near) == {"step": 7}
    assert client.json(f"api/nearest/{id}", **near | {"value": 0})["step"] == 15


def test_a_step_shows_documents_with_text_and_the_proof(
    open_board: Any, runs: Path, written: tuple[Path, Plan]
) -> None:
    client = open_board(runs)
    id = client.ids()["other"]
    result = client.json(f"api/step/{id}/7")
    assert result["proved"] and result["count"] == BATCH == len(result["rows"])
    assert result["metrics"] == lines(runs / "other/metrics.jsonl")[7]
    assert result["before"] == lines(runs / "other/metrics.jsonl")[6]
    assert sum(result["counts"].values()) == BATCH
    from headrace.mixtures.audit.auditor import Auditor
    from headrace.mixtures.planning.open_plan import open_plan

    rows, _ = Auditor(open_plan(str(runs / "other")), text=True).step(7)
    for shown, row in zip(result["rows"], rows, strict=True):
        assert shown["hash"] == row.tokens_hash and shown["source"] == row.source
        pieces = [document["text"] for document in shown["documents"]]
        assert row.text is not None
        # a character whose bytes two pieces share is whole in the row alone
        assert "".join(pieces).replace("\ufffd", "")[:8] in row.text.replace("\ufffd", "")
        assert sum(document["tokens"] for document in shown["documents"]) == LENGTH
        for document, audited in zip(shown["documents"], row.documents, strict=True):
            assert {name: document[name] for name in vars(audited)} == vars(audited)
    planned = client.json(f"api/step/{id}/15")
    assert not planned["proved"] and not planned["taken"] and planned["metrics"] is None
    assert "steps 0 to 19, not 99" in client.json(f"api/step/{id}/99")["error"]


def test_a_step_lists_the_documents_with_the_largest_losses(open_board: Any, runs: Path) -> None:
    """A document's pieces are added; `page` leads to its first row. Damage is named."""
    client, file = open_board(runs), runs / "other/documents.jsonl"
    url = f"api/step/{client.ids()['other']}/7"
    plain = client.json(url)
    assert (plain["documents"], plain["documents_problem"]) == ([], None)
    first = plain["rows"][0]
    largest = first["documents"][0]["document"]
    places = [
        (row["row"], piece["at"])
        for row in plain["rows"]
        for piece in row["documents"]
        if (row["source"], piece["document"]) != (first["source"], largest)
    ]
    pieces = [PieceLoss(*place, 2.0, 4.0) for place in places]
    pieces.append(PieceLoss(first["row"], first["documents"][0]["at"], 9.0, 3.0))
    file.write_bytes(encode_line(encode_step(7, 18.0, pieces)))
    try:
        share, *shares = client.json(url)["documents"]
        assert (share["rows"], share["share"], share["loss"]) == ([first["row"]], 0.5, 3.0)
        assert share["document"] == largest and share["page"] == 0
        assert {row for share in shares for row in share["rows"]} == {row for row, _ in places}
        assert sum(share["share"] for share in shares) == pytest.approx(len(places) / 9)
        file.write_bytes(file.read_bytes().replace(b"18.0", b"19.0"))
        damaged = client.json(url)
        assert "has an invalid line" in damaged["documents_problem"] and damaged["rows"]
    finally:
        file.unlink()


def test_changed_rows_are_no_proof(open_board: Any, runs: Path) -> None:
    ledger = runs / "base/ledger.jsonl"
    entries = lines(ledger)
    entries[7]["hash"] = "0" * 32
    ledger.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    client = open_board(runs)
    result = client.json(f"api/step/{client.ids()['base']}/7")
    assert "do not match their hash" in result["error"] and "rows" not in result
    assert client.json(f"api/step/{client.ids()['base']}/6")["proved"]


def test_plan_layout_checkpoints_and_history(
    open_board: Any, runs: Path, written: tuple[Path, Plan]
) -> None:
    (runs / "base/checkpoints/step-00000015").mkdir()
    client = open_board(runs)
    result = client.json(f"api/run/{client.ids()['base']}")
    stable, anneal = result["plan"]["phases"]
    assert stable["planned"] == pytest.approx([0.75, 0.25]) and anneal["planned"] == [0.5, 0.5]
    assert sum(stable["taken"]) == 10 * BATCH and stable["taken"][0] == pytest.approx(30, abs=1)
    assert sum(stretch["tokens"] for stretch in stable["stretches"]) == 10 * BATCH * LENGTH
    taken = result["plan"]["taken"]
    assert [item["tokens"] for item in taken] == [BATCH * LENGTH] * STEPS, "a column ends at a step"
    for column, line in zip(taken, lines(runs / "base/metrics.jsonl"), strict=True):
        rows = [line["sources"].get(name, {"rows": 0})["rows"] for name in ("web", "code")]
        assert column["shares"] == [source_rows / BATCH for source_rows in rows]
    ranks = result["layout"]["ranks"]
    assert [rank["place"]["dp"] for rank in ranks] == [0, 0, 1, 1]
    assert [rank["place"]["tp"] for rank in ranks] == [0, 1, 0, 1]
    assert [rank["memory"] for rank in ranks] == [pytest.approx(3e9), None, None, None]
    assert result["layout"]["measured"] is None, "the memory of rank 0 is in the metrics alone"
    with (runs / "base/events.jsonl").open("a") as file:
        memory = {"time": 1e9 + 6, "event": "memory", "step": 6, "memory": [4e9, 3e9, 5e9, 2e9]}
        file.write(json.dumps(memory) + "\n")
    client.board.refresh()
    layout = client.json(f"api/run/{client.ids()['base']}")["layout"]
    assert [rank["memory"] for rank in layout["ranks"]] == [4e9, 3e9, 5e9, 2e9]
    assert layout["measured"] == 6
    damaged, whole = result["checkpoints"]
    assert (whole["step"], whole["tokens"]) == (10, 10 * BATCH * LENGTH) and whole["size"] > 0
    assert damaged["step"] == 15 and "manifest.json" in damaged["problem"]
    assert [event["event"] for event in result["events"]] == ["start", "resume", "finish"]
    assert "plan.json" in result["files"] and "layout.yaml" not in result["files"]


def test_scores_are_those_of_the_runs_files(open_board: Any, runs: Path) -> None:
    write_scores(runs / "base", {10: 0.5, 20: 0.625})
    with (runs / "base/scores.jsonl").open("a") as file:
        file.write('{"step": 30, "tasks"')
    client = open_board(runs)
    ids = client.ids()
    assert client.json(f"api/run/{ids['other']}")["scores"] == []
    result = client.json(f"api/run/{ids['base']}")["scores"]
    assert [(item["step"], item["task"], item["value"]) for item in result] == [
        (10, "arc <easy>", "0.5000 ± 0.01"),
        (20, "arc <easy>", "0.6250 ± 0.01"),
        (20, "needle", "75.00%"),
    ]


def test_missing_scores_are_named(open_board: Any, runs: Path) -> None:
    """The run saved its last checkpoint and was killed before its scores; then the task failed."""
    run = runs / "base"
    with (run / "run.yaml").open("a") as file:
        file.write("scores: {tasks: [arc_easy]}\n")
    client = open_board(run)

    def state() -> tuple[str, Any]:
        client.board.refresh()
        (result,) = client.json("api/runs")["runs"]
        return result["status"], result["missing"]

    assert state() == ("finished", []), "no checkpoint of the last step"
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": 9.0, "event": "checkpoint", "step": STEPS}) + "\n")
        file.write(json.dumps({"time": 9.0, "event": "finish", "step": STEPS}) + "\n")
    command = f"trainer eval {run} --step {STEPS}"
    text = f"step {STEPS} has no scores of arc_easy yet"
    assert state() == ("unscored", [{"text": text, "command": command}])
    entry = {"step": STEPS, "asked": ["arc_easy"], "failed": {"arc_easy": "no hub"}, "tasks": {}}
    (run / "scores.jsonl").write_text(json.dumps(entry) + "\n")
    text = f"the scores of arc_easy at step {STEPS} failed: no hub"
    assert state() == ("finished", [{"text": text, "command": command}])


def test_new_steps_and_new_runs_appear(open_board: Any, runs: Path) -> None:
    later = lines(runs / "other/metrics.jsonl")
    shutil.move(runs / "base", runs.parent / "base")
    client = open_board(runs)
    assert list(client.ids()) == ["other"]
    with (runs / "other/metrics.jsonl").open("a") as file:
        file.write(json.dumps({**later[-1], "step": 12, "tokens": 13 * 256}) + "\n")
    shutil.move(runs.parent / "base", runs / "a/b/base")
    client.board.scan()
    client.board.refresh()
    result = {run["name"]: run["entries"] for run in client.json("api/runs")["runs"]}
    assert result == {"base": STEPS, "other": 13}
    numbers = {run["name"]: run["number"] for run in client.json("api/runs")["runs"]}
    assert numbers == {"base": 1, "other": 0}, "a run has another colour after another appeared"
    with (runs / "other/metrics.jsonl").open("a") as file:
        file.write("{broken\n")
    client.board.refresh()
    listed = {run["name"]: run for run in client.json("api/runs")["runs"]}
    assert "line 14 of" in listed["other"]["problem"] and listed["base"]["problem"] is None


def test_a_run_is_shown_once_whatever_its_path(
    open_board: Any, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(runs.parent)
    (runs.parent / "link").symlink_to(runs / "base")
    client = open_board("runs", runs, "runs/base", "link")
    assert sorted(client.ids()) == ["base", "other"] and len(client.board.runs) == 2


def test_a_place_that_cannot_be_read_is_named_at_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(url: str) -> list[str]:
        raise StorageError(f"cannot list {url}: no credentials")

    monkeypatch.setattr(storage, "names", fail)
    monkeypatch.setattr(serve.Server, "serve_forever", lambda self: None)
    serve.serve(["memory://nowhere"], 0)
    assert "cannot list memory://nowhere: no credentials" in caplog.text


def test_runs_in_a_store_are_shown(
    open_board: Any, runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    store, root = fsspec.filesystem("memory"), f"/board-{tmp_path.name}"
    for name in ("run.yaml", "plan.json", "metrics.jsonl", "events.jsonl", "ledger.jsonl"):
        store.pipe_file(f"{root}/runs/base/{name}", (runs / "base" / name).read_bytes())
    client = open_board(f"memory:/{root}")
    [(name, id)] = client.ids().items()
    [part] = client.curves(run=id, curve="loss", width=100)
    assert name == "base" and len(part["x"]) == STEPS
    assert client.json(f"api/step/{id}/7")["proved"]
    assert (tmp_path / "cache/headrace-board").is_dir()
    assert not store.exists(f"{root}/runs/base/board")


def test_a_missing_folder_is_an_error(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["board", str(tmp_path / "none")])
    assert result.exit_code == 1 and "there is no folder" in result.output
