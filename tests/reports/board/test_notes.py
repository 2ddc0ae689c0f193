"""Tags and notes of runs, which the board's server writes and reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest


def post(client: Any, path: str, body: bytes, kind: str = "application/json") -> tuple[int, str]:
    request = Request(f"{client.server.url}{path}", body, {"Content-Type": kind}, method="POST")
    try:
        with urlopen(request) as answer:
            return answer.status, answer.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def test_notes_are_written_into_the_run_s_folder_and_read_by_every_board(
    open_board: Any, runs: Path
) -> None:
    client = open_board(runs)
    place = f"api/notes/{client.ids()['base']}"
    body = json.dumps({"tags": ["a", " a ", "b c"], "note": " x\n"}).encode()
    assert post(client, place, body) == (200, '{"tags": ["a", "b c"], "note": "x"}')
    assert (runs / "base/notes.yaml").read_text() == "tags:\n- a\n- b c\nnote: x\n"
    [base] = [run for run in open_board(runs).json("api/runs")["runs"] if run["name"] == "base"]
    assert (base["tags"], base["note"]) == (["a", "b c"], "x")


@pytest.mark.parametrize(
    ("body", "kind", "code", "message"),
    [
        (b"{", "application/json", 400, "notes are JSON"),
        (b"tags=a", "application/x-www-form-urlencoded", 400, "notes are JSON"),
        (b'{"tags": "a"}', "application/json", 500, "tags: is no list"),
        (b'{"tags": [""]}', "application/json", 500, "tags: is no list"),
        (b'{"note": 3, "mood": 1}', "application/json", 500, "mood: is neither tags nor note"),
        (b"[]", "application/json", 500, "is neither tags nor note"),
        (b" " * (1 << 18), "application/json", 413, "too long"),
    ],
)
def test_wrong_notes_are_refused(
    open_board: Any, runs: Path, body: bytes, kind: str, code: int, message: str
) -> None:
    client = open_board(runs)
    status, text = post(client, f"api/notes/{client.ids()['base']}", body, kind)
    assert status == code and message in text
    assert not (runs / "base/notes.yaml").exists()


def test_notes_are_written_nowhere_else(open_board: Any, runs: Path, tmp_path: Path) -> None:
    client = open_board(runs)
    (runs / "base/notes.yaml").symlink_to(tmp_path / "elsewhere")
    status, text = post(client, f"api/notes/{client.ids()['base']}", b'{"note": "x"}')
    assert status == 500 and "is a link" in text and not (tmp_path / "elsewhere").exists()
    assert post(client, "api/notes/none", b"{}")[0] == 404
    assert post(client, "api/runs", b"{}")[0] == 404
    url = client.server.url
    client.server.token = "another"
    request = Request(f"{url}api/notes/x", b"{}", {"Content-Type": "application/json"})
    with pytest.raises(HTTPError, match="403"):
        urlopen(request)


def test_damaged_notes_are_named(open_board: Any, runs: Path) -> None:
    (runs / "base/notes.yaml").write_text("tags: first\n")
    [base] = [run for run in open_board(runs).json("api/runs")["runs"] if run["name"] == "base"]
    assert "tags: is no list of words" in base["problem"] and base["tags"] == []
