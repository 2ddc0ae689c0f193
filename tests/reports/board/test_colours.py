"""A run has the same colour in every board."""

from __future__ import annotations

import shutil
from pathlib import Path

from headrace.reports.board.board import Board


def colours(*places: Path) -> dict[str, int | None]:
    board = Board([str(place) for place in places])
    board.scan()
    return {Path(run.url).name: run.number for run in board.runs.values()}


def test_a_colour_stays_when_boards_and_runs_come_and_go(runs: Path) -> None:
    assert colours(runs) == {"base": 0, "other": 1}
    shutil.rmtree(runs / "base")
    assert colours(runs) == {"other": 1}
    shutil.copytree(runs / "other", runs / "a-copy")
    assert colours(runs / "other") == {"other": 1}
    assert set(colours(runs).values()) == {0, 1}, "a copy is told apart"
    assert colours(runs / "other") == {"other": 1}


def test_a_damaged_colour_is_chosen_again(runs: Path) -> None:
    colours(runs)
    (runs / "other/board/colour").write_text("?")
    assert colours(runs) == {"base": 0, "other": 1}
