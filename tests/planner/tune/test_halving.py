"""Successive halving, and the folder in which a killed tune continues."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.console.errors import BusyError, RunError
from headrace.planner.tune.folder import TuneFolder
from headrace.planner.tune.halving import halve
from headrace.planner.tune.trial import TrialResult


def took(seconds: float) -> TrialResult:
    return TrialResult(outcome="measured", seconds=seconds)


def test_each_round_has_half_of_the_candidates_and_twice_the_steps() -> None:
    seconds = [1.00, 0.99, 1.01, 0.98, 1.02, 0.97, 1.03, 0.96]
    asked: list[tuple[int, int, int]] = []

    def measure(*trial: int) -> TrialResult:
        asked.append(trial)
        return took(seconds[trial[0]])

    ranked = halve(8, 12, measure)
    assert ranked.best == 7 and not ranked.early
    by_round = [[c for c, number, _ in asked if number == n] for n in range(ranked.rounds)]
    assert by_round == [list(range(8)), [1, 3, 5, 7], [5, 7]]
    assert {(number, steps) for _, number, steps in asked} == {(0, 12), (1, 24), (2, 48)}


def test_a_candidate_far_ahead_ends_the_trials_early() -> None:
    ranked = halve(8, 12, lambda candidate, number, steps: took(1.0 if candidate else 0.5))
    assert (ranked.best, ranked.rounds, ranked.early) == (0, 1, True)


def test_a_trial_that_dies_of_memory_is_a_result() -> None:
    dead = TrialResult(outcome="memory", error="rank 0 ran out of memory")
    ranked = halve(3, 4, lambda c, number, steps: dead if c == 0 else took(float(c)))
    assert ranked.best == 1 and ranked.results[0] is dead
    assert halve(3, 4, lambda *trial: dead).best is None


class Killed(BaseException):
    """The process ends."""


def run(folder: TuneFolder, seen: list[str], lives: int | None = None) -> int | None:
    """Tune four candidates; end after `lives` trials have begun, before the last is stored."""

    def measure(candidate: int, number: int, steps: int) -> TrialResult:
        def trial(place: Path) -> TrialResult:
            if lives is not None and len(seen) == lives:
                raise Killed
            seen.append(place.name)
            return took(1 + candidate / 100)

        return folder.once(f"{candidate:02}-{number}", trial)

    with folder.locked():
        return halve(4, 4, measure).best


@pytest.mark.parametrize("lives", range(7))
def test_a_killed_tune_runs_no_finished_trial_again(tmp_path: Path, lives: int) -> None:
    folder, seen = TuneFolder(tmp_path), list[str]()
    folder.open({}, list)
    if lives < 6:
        with pytest.raises(Killed):
            run(folder, seen, lives)
        assert len(seen) == lives
    assert run(folder, seen) == 0
    assert seen == ["00-0", "01-0", "02-0", "03-0", "00-1", "01-1"]


def test_a_folder_of_another_tune_is_refused_with_each_difference(tmp_path: Path) -> None:
    folder = TuneFolder(tmp_path)
    folder.open({"steps": 4, "model": "a"}, list)
    with pytest.raises(RunError) as error:
        folder.open({"steps": 8, "model": "b"}, list)
    assert "steps: the folder has 4, this tune 8" in str(error.value)
    assert "model: the folder has a, this tune b" in str(error.value)
    assert folder.open({"steps": 4, "model": "a"}, pytest.fail) == []


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with (
        pytest.raises(RunError, match=r"other files \(thesis\.tex\) and no tune"),
        TuneFolder(tmp_path).locked(),
    ):
        pass


def test_a_tune_that_was_killed_in_its_search_begins_again(tmp_path: Path) -> None:
    """tune.json is written last: candidates without it are of no tune."""
    folder = TuneFolder(tmp_path)
    folder.candidates.mkdir()
    folder.candidate(0).write_text("half")
    with folder.locked():
        assert folder.open({}, list) == []


def test_a_second_tune_does_not_wait_for_the_lock(tmp_path: Path) -> None:
    with (
        TuneFolder(tmp_path).locked(),
        pytest.raises(BusyError, match="in use by another tune"),
        TuneFolder(tmp_path).locked(),
    ):
        pass
    with TuneFolder(tmp_path).locked():  # it ended with its holder
        pass


def test_a_half_written_result_is_run_again(tmp_path: Path) -> None:
    folder = TuneFolder(tmp_path)
    folder.results.mkdir()
    (folder.results / ".00-0.json.tmp").write_text("{")
    assert folder.once("00-0", lambda place: took(2.0)).seconds == 2.0
    assert json.loads((folder.results / "00-0.json").read_text())["seconds"] == 2.0
