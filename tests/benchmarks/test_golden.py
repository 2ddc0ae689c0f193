"""The golden runs did not move, and a change that moves them is seen."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import pytest
from support.ranks import forked

from benchmarks.golden import __main__ as golden
from benchmarks.golden.bounds import limits_of
from benchmarks.golden.cases import (
    FORMS,
    LENGTHS,
    QUICK,
    SHORT,
    SHORTEST,
    Case,
    GoldenError,
    choose,
)
from benchmarks.golden.compare import Bounds, Limits, difference, spread
from benchmarks.golden.corpus import mixture, write_corpus
from benchmarks.golden.recordings import Recording, circumstances
from benchmarks.golden.trees import Curve, Tree, Workshop, working_tree

ROOT = Path(__file__).parents[2]
CASE = Case("tiny-hybrid", "one")
STEPS = FORMS["shortest"].steps
present_circumstances = cache(circumstances)


# Runs


class Forks(Workshop):
    """Runs the commands of the present tree in forks (forked.py)."""

    def command(self, name: str) -> list[str]:
        return [sys.executable, "-m", self.scripts[name].partition(":")[0]]

    def run(self, words: Sequence[str], *, code: int = 0) -> str:
        if "-m" not in words:
            return super().run(words, code=code)
        done = forked.run(words, env=self.environment(), cwd=self.folder)
        assert done.returncode == code, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """The present tree, with the datasets built."""
    shop = Forks(working_tree(), tmp_path_factory.mktemp("golden"))
    shop.prepare()
    return shop


def moved(shop: Workshop, curve: Curve, case: Case = CASE) -> str | None:
    """Compare with the recording as `make regress` does; return the quantity that differs."""
    recorded = Recording(case.model, "short").load().get(case, shop.digest(case))
    exact = present_circumstances(shop) == recorded.circumstances
    result = difference(recorded.curve, curve, None if exact else limits_of(case))
    beyond = difference(recorded.curve, curve, limits_of(case))
    assert (result is None) == (beyond is None), "on another machine, the bounds alone must see it"
    return None if result is None else result.quantity


@pytest.mark.slow
def test_the_golden_runs_did_not_move(
    shop: Workshop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(golden, "workshop", lambda *_: nullcontext(shop))
    monkeypatch.setattr(golden, "circumstances", present_circumstances)
    code = golden.main(["regress", "--shortest"])
    assert code == 0, capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("model", sorted({*QUICK} - {*SHORTEST}))
def test_the_first_step_of_each_tiny_model_did_not_move(shop: Workshop, model: str) -> None:
    case = Case(model, "one")
    assert moved(shop, shop.train(case, 1), case) is None


@pytest.mark.slow
def test_a_learning_rate_one_percent_higher_fails(shop: Workshop) -> None:
    curve = shop.train(CASE, STEPS, ["optimizer.lr=1.01e-3"])
    assert moved(shop, curve) in ("loss", "gradient norm")


@pytest.mark.long
def test_another_seed_of_the_mixture_fails(shop: Workshop) -> None:
    curve = shop.train(CASE, 2, ["mixture.seed=6"])
    assert moved(shop, curve) == "ledger"


@pytest.mark.long
def test_initial_taps_of_one_filter_one_percent_larger_fail(shop: Workshop, tmp_path: Path) -> None:
    """The filter of Hyena-SE, in a copy of the tree."""
    tree = tmp_path / "tree"
    (tree / ".root").mkdir(parents=True)
    (tree / ".root" / "headrace").symlink_to("..")
    for path in ROOT.iterdir():
        if path.name in ("__init__.py", "pyproject.toml"):
            shutil.copy(path, tree)
        elif path.is_dir() and path.name != "models" and not path.name.startswith("."):
            (tree / path.name).symlink_to(path)
    shutil.copytree(ROOT / "models", tree / "models")
    [file] = [
        file for file in (tree / "models").rglob("*.py") if "class HyenaSE(" in file.read_text()
    ]
    text, count = re.subn(r"(short_filter\(self\.taps, )", r"\g<1>0.98 * ", file.read_text())
    assert count == 1, "Hyena-SE draws its taps by other code: change this pattern"
    file.write_text(text)
    (tmp_path / "work").mkdir()
    patched = Workshop(Tree(tree, "patched"), tmp_path / "work")
    patched.prepare()
    assert moved(shop, patched.train(CASE, STEPS)) in ("loss", "gradient norm")


# Comparison

LIMITS = Limits(loss=Bounds(1e-6, 1.0, 1e-3), norm=Bounds(1e-5, 1.0, 1e-2))
"""Bounds that double with each step."""


def curve(**changes: tuple[int, object]) -> Curve:
    """Four steps; `changes` are a step and its other value, by quantity."""
    lists = {
        "ledger": ["a", "b", "c", "d"],
        "loss": [4.0, 3.0, 2.0, 1.0],
        "norm": [1.0, 1.0, 1.0, 1.0],
    }
    for name, (step, value) in changes.items():
        lists[name][step] = value  # type: ignore[call-overload]
    return Curve(**lists)  # type: ignore[arg-type]


def test_equal_curves_do_not_differ() -> None:
    assert difference(curve(), curve(), None) is None
    assert str(spread(curve().loss, curve().loss)) == "equal"


def test_one_bit_differs() -> None:
    result = difference(curve(), curve(loss=(2, 2.0000000000000004)), None)
    assert result is not None and (result.quantity, result.step) == ("loss", 2)
    assert "2.0 → 2.0000000000000004" in str(result) and "equal bits" in str(result)


@pytest.mark.parametrize("limits", [None, LIMITS])
def test_the_ledger_is_compared_to_the_bit(limits: Limits | None) -> None:
    result = difference(curve(), curve(ledger=(1, "x")), limits)
    assert result is not None and (result.quantity, result.step) == ("ledger", 1)


def test_bounds_grow_with_the_step() -> None:
    assert difference(curve(), curve(loss=(3, 1.0 + 7.9e-6)), LIMITS) is None
    result = difference(curve(), curve(loss=(2, 2.0 + 2 * 4.1e-6)), LIMITS)
    assert result is not None and (result.quantity, result.step) == ("loss", 2)
    assert Bounds(1e-6, 1.0, 1e-3).at(10**6) == 1e-3


def test_the_earliest_difference_is_named() -> None:
    result = difference(curve(), curve(loss=(3, 5.0), norm=(1, 5.0)), LIMITS)
    assert result is not None and (result.quantity, result.step) == ("gradient norm", 1)


@pytest.mark.parametrize("limits", [None, LIMITS])
def test_a_number_that_is_not_finite_differs_from_each_other(limits: Limits | None) -> None:
    assert difference(curve(), curve(loss=(0, None)), limits) is not None
    assert difference(curve(loss=(0, None)), curve(loss=(0, None)), limits) is None


def test_a_longer_recording_is_compared_by_its_first_steps() -> None:
    short = Curve(ledger=["a"], loss=[4.0], norm=[1.0])
    assert difference(curve(), short, None) is None
    assert difference(curve(loss=(0, 4.1)), short, None) is not None


def test_runs_of_other_lengths_share_a_ledger(tmp_path: Path) -> None:
    about = {"commit": "c", "circumstances": {}, "data": "d"}
    short = Curve(ledger=["a"], loss=[4.0], norm=[1.0])
    recording = Recording(CASE.model, "short", tmp_path)
    tp2 = Case(CASE.model, "tp2")
    for case, case_curve in ((CASE, short), (tp2, curve()), (CASE, short)):
        recording.put(case, case_curve, **about)
    read = Recording(CASE.model, "short", tmp_path).load()
    assert read.get(CASE, "d").curve == short and read.get(tp2, "d").curve == curve()


# Recordings


def test_the_recordings_are_those_of_the_present_cases() -> None:
    for case in choose("short", [], []):
        file = Recording(case.model, "short").load()
        if file.steps(case):
            assert file.runs[case.layout]["options"] == case.words(), "renew the recording"
    assert set(LENGTHS) == set(SHORT)


def test_each_model_and_each_case_of_the_quick_form_is_recorded() -> None:
    ones = [case for case in choose("short", [], []) if case.layout == "one"]
    for case in (*ones, *choose("quick", [], []), *choose("shortest", [], [])):
        assert Recording(case.model, "short").load().steps(case) >= FORMS["quick"].steps, case


def test_a_case_without_a_recording_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--models", "tiny-moe", "--layouts", "tp2", "--recordings", str(tmp_path)]
    code, said = failing(capsys, "regress", *words)
    assert code == 1 and "no run of layout tp2" in said and "make golden MODELS=tiny-moe" in said


def test_each_tiny_model_has_a_case() -> None:
    tiny = {file.stem for file in (ROOT / "configs" / "models").glob("tiny-*.yaml")}
    assert tiny < set(SHORT) and tiny == set(QUICK)


def test_the_forms_begin_alike() -> None:
    """A recording of the short form serves the shorter ones."""
    for name in ("shortest", "quick"):
        assert set(choose(name, [], [])) <= set(choose("short", [], []))
        assert FORMS[name].steps <= FORMS["short"].steps


def test_the_corpus_has_the_same_bytes_each_time(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name)
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    assert mixture(64) != mixture(32)


def test_numbers_survive_a_recording(tmp_path: Path) -> None:
    written = Curve(ledger=["a", "b"], loss=[0.1 + 0.2, None], norm=[1e-308, 3.0000000000000004])
    about = {"commit": "c", "circumstances": {"threads": 1}, "data": "d"}
    Recording(CASE.model, "short", tmp_path).put(CASE, written, **about)
    read = Recording(CASE.model, "short", tmp_path).load().get(CASE, "d")
    assert read.curve == written and read.circumstances == {"threads": 1}


def test_a_layout_with_another_ledger_is_not_recorded(tmp_path: Path) -> None:
    about = {"commit": "c", "circumstances": {}, "data": "d"}
    recording = Recording(CASE.model, "short", tmp_path)
    recording.put(CASE, curve(), **about)
    with pytest.raises(GoldenError, match="ledger differs from that of one"):
        recording.put(Case(CASE.model, "tp2"), curve(ledger=(3, "x")), **about)


# Mistakes


def failing(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = golden.main([*words])
    return code, capsys.readouterr().err


def test_unknown_names_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = failing(capsys, "regress", "--models", "tiny-hybird")
    assert code == 2 and "unknown model tiny-hybird" in said and "hint: models are" in said
    code, said = failing(capsys, "regress", "--layouts", "tp3")
    assert code == 2 and "unknown layout tp3" in said and "tp2" in said
    code, said = failing(capsys, "regress", "--models", "hybrid-50m", "--layouts", "bf16")
    assert code == 2 and "no case" in said


def test_an_unknown_commit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = failing(capsys, "regress", "--a", "no-such-commit")
    assert code == 2 and "no-such-commit" in said and "hint: " in said


@pytest.mark.parametrize("damage", ["{", '{"ledger": [], "runs": {}}', '{"runs": []}'])
def test_a_damaged_recording_is_named(
    damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / f"{CASE.model}.json").write_text(damage)
    code, said = failing(capsys, "regress", "--shortest", "--recordings", str(tmp_path))
    assert code == 1 and f"{CASE.model}.json" in said and "hint: " in said
