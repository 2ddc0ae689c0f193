"""`trainer anneal`: candidates of one checkpoint, trained, ranked and continued."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from headrace.console.errors import ConfigError, MisuseError
from headrace.mixtures.mixture_file.mixture import PhaseSpec
from headrace.mixtures.planning.resolve_mixture import resolve_file
from headrace.reports.anneal import train
from headrace.reports.anneal.candidates import apply_shares, parse_grid
from headrace.reports.anneal.folder import AnnealFolder
from headrace.reports.board.board import Board
from headrace.trainer.cli import main


def anneal(*words: object) -> Any:
    return CliRunner().invoke(main, ["anneal", "main", *map(str, words)])


@pytest.mark.slow
def test_candidates_are_trained_ranked_and_found_again(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two mixtures with two seeds. Each learns the source that it adds, by more than the noise."""
    words = ("--mixtures", "signs.yaml", "digits.yaml", "--seeds", 2, "--out", "both", "--json")
    only = ("--score", "signs=1")
    done = anneal(*words, *only)
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    signs, digits = result["candidates"]
    assert (signs["name"], digits["name"]) == ("signs", "digits")
    assert signs["by_source"]["signs"] < digits["by_source"]["signs"]
    assert signs["by_source"]["digits"] > digits["by_source"]["digits"]
    assert digits["clearly_worse"] and result["noise"] > 0 and not result["waiting"]
    assert signs["score"] == pytest.approx(signs["by_source"]["signs"])
    assert sum(signs["shares"].values()) == pytest.approx(1) and signs["shares"]["signs"] == 0.5
    # The first seed is the exact continuation, the second takes other rows of the same sources.
    by_hand, digits_yaml = Path("by-hand.yaml"), Path("digits.yaml").read_text()
    by_hand.write_text(f"after: {{run: main, step: 8}}\n{digits_yaml}")
    plan = resolve_file(str(by_hand)).hash
    first, second = digits["runs"]
    assert first["plan"] == plan != second["plan"]
    assert first["ledger"] != second["ledger"] and first["score"] != second["score"]
    page = Path(result["page"]).read_text()
    assert all(run["plan"] in page and run["ledger"] in page for run in (first, second))
    # By another score the order is another; nothing is trained again.
    monkeypatch.setattr(train, "run_trainer", pytest.fail)
    again = json.loads(anneal(*words, "--score", "digits=1").stdout)
    assert [item["name"] for item in again["candidates"]] == ["digits", "signs"]
    assert "which no held-out dataset has" in anneal(*words, "--score", "letterz=1").output
    Path("copy.yaml").write_text(digits_yaml)
    assert "digits and copy have the same plan" in anneal(*words[:3], "copy.yaml").output
    # Another request is refused, and each difference named.
    changed = anneal(*words, *only, "mixture.phases.anneal.tokens=5K")
    assert changed.exit_code == 1 and "candidates.signs, seed 0: the folder has" in changed.output


def write_without() -> None:
    """Write mixtures that leave out documents of `signs`, which carry a fact: its letters."""
    Path("ids.txt").write_text("".join(f"signs-{number}\n" for number in range(100)))
    without = f"without: [ids.txt]\n{Path('signs.yaml').read_text()}"
    Path("without.yaml").write_text(without)
    few = "".join(f"signs-{number}\n" for number in range(10))
    Path("few.txt").write_text(few)
    Path("refilled.yaml").write_text(without.replace("ids", "few") + "refill: true\n")


def test_candidates_without_documents_are_candidates_of_their_own(inside: Path) -> None:
    """They have the order of the mixture with these documents, or a few rows of another."""
    write_without()
    words = ("--mixtures", "signs.yaml", "without.yaml", "refilled.yaml", "--out", "fact")
    done = anneal(*words, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    plans = [candidate["plan"] for candidate in json.loads(done.stdout)]
    assert len(set(plans)) == 3


@pytest.mark.slow
def test_the_influence_of_planted_documents_shows(inside: Path) -> None:
    """Both runs take the same rows; the documents' letters are learnt by the run with them."""
    write_without()
    words = ("--mixtures", "signs.yaml", "without.yaml", "--out", "fact", "--json")
    done = anneal(*words)
    assert done.exit_code == 0, done.output
    candidates = {item["name"]: item for item in json.loads(done.stdout)["candidates"]}
    learnt, unlearnt = candidates["signs"], candidates["without"]
    assert learnt["runs"][0]["ledger"] == unlearnt["runs"][0]["ledger"]
    assert learnt["by_source"]["signs"] < 0.9 * unlearnt["by_source"]["signs"]


def test_a_stopped_anneal_goes_on_and_a_failed_run_is_named(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_trainer = train.run_trainer
    words = ("digits.yaml", "--grid", "digits=0.2,0.4", "--out", "stopped")
    codes = [0, 85]
    trained: list[str] = []

    def interrupted(arguments: Sequence[str]) -> int:
        trained.append(arguments[-1] if arguments[-2] == "--out" else arguments[-3])
        return codes.pop(0) or run_trainer(arguments)

    monkeypatch.setattr(train, "run_trainer", interrupted)
    done = anneal(*words)
    assert done.exit_code == 85 and "the same command goes on" in done.output
    codes += [1]
    done = anneal(*words)
    assert done.exit_code == 1 and "1 of 2 runs failed" in done.output
    assert [Path(item).name for item in trained] == ["00", "01", "01"]
    report = anneal(*words, "--report", "--json")
    result = json.loads(report.stdout)
    assert result["waiting"] == ["digits digits=0.4, seed 0"] and len(result["candidates"]) == 1
    assert result["noise"] is None and "1 run is not finished" in report.stderr

    check_its_runs_are_runs_like_any("stopped")


def check_its_runs_are_runs_like_any(folder: str) -> None:
    """`trainer list` and the board show them; a command for a run names them."""
    listed = json.loads(CliRunner().invoke(main, ["list", folder, "--json"]).stdout)
    status = {run["folder"]: run["status"] for run in listed}
    runs = [f"{folder}/runs/00", f"{folder}/runs/01"]
    assert list(status) == runs[: len(status)] and status[runs[0]] == "finished"
    assert "unreadable" not in status.values()
    board = Board([folder])
    board.scan()
    assert [run["name"] for run in board.summary()["runs"]] == list(status)
    for words in (["resume"], ["report"], ["export"]):
        out = ["out"] if words == ["export"] else []
        done = CliRunner().invoke(main, [*words, folder, *out])
        assert done.exit_code == 1 and "it is the folder of a `trainer anneal`" in done.output
        assert f"name a run in it: {', '.join(status)}" in done.output


def test_a_slurm_array_has_a_task_for_each_run(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without sbatch here, the error names the script; a task becomes the run of its candidate."""
    words = ("--mixtures", "digits.yaml", "--grid", "digits=0.1,0.2,0.3", "--out", "array")
    monkeypatch.setenv("PATH", "")
    done = anneal(*words, "--slurm", "slurm.nodes=2", "slurm.processes=4")
    assert "sbatch is not installed" in done.output
    script = Path("array/slurm.sh").read_text()
    assert "#SBATCH --array=0,1,2\n" in script and "--nodes=2" in script
    assert "--grid digits=0.1,0.2,0.3" in script and '--task "$SLURM_ARRAY_TASK_ID"' in script
    became: list[str] = []

    def execv(program: str, arguments: list[str]) -> None:
        became.extend(arguments)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    assert anneal(*words, "--task", 2).exit_code == 0
    folder = AnnealFolder("array")
    assert became[4:] == [
        "run", "array/settings.yaml", "--model", "array/model.yaml",
        "--mixture", str(folder.mixture_file(2)), "--out", str(folder.run_folder(2).root),
    ]  # fmt: skip
    assert "digits: 0.3" in folder.mixture_file(2).read_text()


def test_all_problems_are_reported_before_a_run_starts(inside: Path) -> None:
    digits = Path("digits.yaml").read_text()
    Path("other.yaml").write_text(f"after: {{run: main, step: 3}}\n{digits}")
    Path("wrong.yaml").write_text(digits.replace("digits: 0.5", "digits: 0.6"))
    Path("same.yaml").write_text(f"after: {{run: main, step: 8}}\n{digits}")
    both = digits.replace("digits: 0.5", "digits: 0.6")
    Path("both.yaml").write_text(f"after: {{run: main}}\n{both}")
    done = anneal(
        "--mixtures", "other.yaml", "wrong.yaml", "same.yaml", "both.yaml", "missing.yaml"
    )
    assert done.exit_code == 1 and not Path("main-anneal").exists()
    for name in ("other.yaml", "same.yaml", "both.yaml"):
        assert f"1 problem in {name}\n  line 1: after: a candidate has none" in done.output
    assert "1 problem in wrong.yaml" in done.output and "missing.yaml" in done.output
    assert done.output.count("1 problem in both.yaml") == 2  # `after`, and the sum of its weights
    assert "has no checkpoint of step 5" in anneal("digits.yaml", "--at", 5).output
    assert "give mixtures" in anneal().output
    grid = anneal("digits.yaml", "--grid", "paper=0.1")
    assert "which neither digits.yaml nor the run has" in grid.output
    assert (
        "the candidates have the model of the run" in anneal("digits.yaml", "model.width=8").output
    )


def test_a_score_of_a_source_without_held_out_rows_is_refused_before_training(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train, "run_trainer", pytest.fail)
    for start in (["--dry-run"], []):
        done = anneal("digits.yaml", "--score", "digits=1", "--score", "nothere=1", *start)
        assert done.exit_code == 2 and "--score names nothere, which no held" in done.output
        assert "the held-out sources are digits, letters" in done.output
    assert not Path("main-anneal").exists()


def test_a_dry_run_shows_each_candidate(inside: Path) -> None:
    done = anneal("digits.yaml", "--grid", "digits=0.2,0.4", "--dry-run", "--json")
    result = json.loads(done.stdout)
    assert [item["shares"]["digits"] for item in result] == pytest.approx([0.28, 0.46])
    assert not Path("main-anneal").exists()


@given(
    weights=st.dictionaries(st.sampled_from("abcdef"), st.floats(0.01, 1), min_size=2),
    share=st.floats(0, 0.99),
)
def test_a_grid_keeps_the_proportions_of_the_other_shares(
    weights: dict[str, float], share: float
) -> None:
    first, *fixed = weights
    spec = PhaseSpec(tokens=1, weights=dict(weights))
    result = apply_shares({first: share}, "p", spec, file="m.yaml")
    assert sum(result.values()) == pytest.approx(1, abs=1e-12)
    assert result[first] == pytest.approx(share, abs=1e-5)
    whole = sum(weights[name] for name in fixed)
    for name in fixed:
        expected = (1 - share) * weights[name] / whole
        assert result[name] == pytest.approx(expected, abs=1e-5 * len(fixed))


@pytest.mark.parametrize(
    ("point", "message"),
    [
        ({"a": 0.6, "b": 0.6}, "sum to 1.2"),
        ({"a": 0.5, "b": 0.4}, "no other source takes the rest"),
    ],
)
def test_shares_of_a_grid_that_do_not_fit_are_named(point: dict[str, float], message: str) -> None:
    spec = PhaseSpec(tokens=1, weights={"a": 0.5, "b": 0.5})
    with pytest.raises(ConfigError, match=message):
        apply_shares(point, "p", spec, file="m.yaml")
    changing = PhaseSpec(tokens=1, weights={"a": {"from": 0.1, "to": 0.9}, "b": 0.5})
    with pytest.raises(ConfigError, match="do not change over the phase"):
        apply_shares({"b": 0.1}, "p", changing, file="m.yaml")


@pytest.mark.parametrize("words", [["math"], ["math=a"], ["math=2"], ["m=0.1", "m=0.2"], ["m=1,1"]])
def test_a_grid_that_cannot_be_read_is_misuse(words: list[str]) -> None:
    with pytest.raises(MisuseError):
        parse_grid(words)
