"""`mixtures search` on planted problems: sources of known worth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from formats.samples import pin_keys

from headrace.console.errors import InputError, MisuseError
from headrace.dataplane.arrays import Float64
from headrace.mixtures.cli import main
from headrace.mixtures.search.measured import load_scores
from headrace.mixtures.search.propose import estimate_effects, find_expected_best, propose
from headrace.mixtures.search.regression import Regression

WORTH = np.array([1.0, 2.0, 0.5, 0.05])
"""Worth of four sources, with diminishing returns; the last is worth next to nothing."""


def true_score(shares: Float64) -> Float64:
    return np.asarray(3.0 - (WORTH * np.sqrt(shares + 0.01)).sum(-1))


def optimum() -> float:
    """Least score of a fine grid: an oracle that knows the truth."""
    grid = np.random.default_rng(1).dirichlet(np.full(4, 0.7), 200_000)
    return float(true_score(grid).min())


def simulated(rounds: int, noise: float, seed: int, *, blind: bool = False) -> float:
    """Return the true score of the best mixture after rounds of four proposals, which are random
    ones if the search is `blind`."""
    random = np.random.default_rng(seed)
    shares = random.dirichlet(np.ones(4), 8)
    scores = true_score(shares) + noise * random.standard_normal(8)
    for number in range(rounds):
        if blind:
            more = random.dirichlet(np.ones(4), 4)
        else:
            fit = Regression(shares, scores, noise)
            best = float(fit.predict(shares)[0].min())
            result = propose(fit, best, 4, np.ones(4), seed=number)
            more = np.array([item.shares for item in result])
        shares = np.vstack([shares, more])
        scores = np.append(scores, true_score(more) + noise * random.standard_normal(4))
    if blind:
        return float(true_score(shares[scores.argmin()]))
    fit = Regression(shares, scores, noise)
    return float(true_score(find_expected_best(fit, float(scores.min()), np.ones(4)).shares))


def test_better_shares_are_found_on_a_planted_problem() -> None:
    """After three rounds of four mixtures the search is near the optimum. Negative control: as many
    random mixtures are not."""
    minimum = optimum()
    regrets = [simulated(3, noise, seed) - minimum for seed, noise in enumerate((0.0, 0.01))]
    blind = [simulated(3, 0.01, seed, blind=True) - minimum for seed in range(4)]
    assert max(regrets) < 0.03
    assert float(np.median(blind)) > 3 * float(np.median(regrets))


@pytest.mark.parametrize("noise", [0.0, 0.01])
def test_proposals_of_a_batch_differ(noise: float) -> None:
    """From one another and from measured mixtures; and there are fewer if limits leave no room."""
    random = np.random.default_rng(0)
    shares = random.dirichlet(np.ones(4), 8)
    fit = Regression(shares, true_score(shares) + noise * random.standard_normal(8), noise)
    best = float(fit.predict(shares)[0].min())
    result = [item.shares for item in propose(fit, best, 6, np.ones(4))]
    every = np.vstack([shares, *result])
    apart = np.abs(every[:, None] - every[None]).max(-1)[len(shares) :]
    assert len(result) == 6
    assert np.sort(apart, axis=1)[:, 1].min() >= 0.02 - 1e-9  # each is nearest to itself
    assert len(propose(fit, best, 6, np.array([0.5, 0.49, 0.01, 0.0]))) == 1


def test_predictions_are_as_sure_as_they_say() -> None:
    """Most true scores of mixtures that were not measured lie within two standard deviations; the
    errors are far below those of the mean."""
    random = np.random.default_rng(3)
    shares = random.dirichlet(np.ones(4), 16)
    fit = Regression(shares, true_score(shares) + 0.005 * random.standard_normal(16), 0.005)
    new_shares = random.dirichlet(np.ones(4), 300)
    mean, error = fit.predict(new_shares)
    truth = true_score(new_shares)
    assert (np.abs(mean - truth) < 2 * error + 1e-3).mean() > 0.85
    assert np.abs(mean - truth).mean() < 0.3 * np.abs(truth - truth.mean()).mean()


def test_the_sources_effects_are_those_of_the_truth() -> None:
    shares = np.random.default_rng(5).dirichlet(np.ones(4), 24)
    fit = Regression(shares, true_score(shares))
    middle = np.full(4, 0.25)
    changes = [change for change, _ in estimate_effects(fit, middle)]
    assert np.argsort(changes).tolist() == np.argsort(-WORTH).tolist()


def test_a_left_out_mixture_is_predicted_by_the_others() -> None:
    """The formula beside a fit without the mixture."""
    shares = np.random.default_rng(6).dirichlet(np.ones(3), 9)
    scores = shares @ np.array([1.0, 2.0, 3.0]) + 0.1 * np.cos(9 * shares[:, 0])
    fit = Regression(shares, scores)
    keep = np.arange(9) != 4
    without = object.__new__(Regression)
    without.mean, without.unit, without.hyperparameters = fit.mean, fit.unit, fit.hyperparameters
    without.shares, without.targets = shares[keep], fit.targets[keep]
    without._fit()
    assert fit.predict_left_out()[4] == pytest.approx(without.predict(shares[4:5])[0][0], abs=1e-9)


@pytest.fixture
def anneal(tmp_path: Path) -> Path:
    """The ranking of an anneal with six candidates."""
    shares = np.random.default_rng(2).dirichlet(np.ones(3), 6)
    candidates = [
        {
            "name": f"c{number}",
            "score": float(row @ [1.0, 2.0, 3.0]),
            "error": 0.01,
            "shares": {
                name: float(x) for name, x in zip(("web", "code", "math"), row, strict=True)
            },
        }
        for number, row in enumerate(shares)
    ]
    (tmp_path / "scores.json").write_text(
        json.dumps({"weights": {"math": 1.0}, "candidates": candidates})
    )
    return tmp_path


def search(*words: object) -> Any:
    return CliRunner().invoke(main, ["search", *map(str, words)])


def test_proposals_become_mixtures(anneal: Path, tmp_path: Path) -> None:
    base, out = tmp_path / "a.yaml", tmp_path / "next"
    base.write_text(
        "sources: {web: {data: w}, code: {data: c}, math: {data: m}}\n"
        "phases: {anneal: {tokens: 10K, weights: {web: 1}, lr: {shape: linear, end: 0}}}\n"
    )
    words = ("--max", "web=0.5", "--mixture", base, "--out", out, "--propose", 2, "--json")
    result = search(anneal, *words)
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    pin_keys("search", answer)
    for proposal in [answer["expected_best"], *answer["proposals"]]:
        assert proposal["shares"]["web"] <= 0.5 and sum(
            proposal["shares"].values()
        ) == pytest.approx(1)
    assert answer["expected_best"]["shares"]["web"] == 0.5  # the best source, as far as allowed
    assert answer["effects"]["web"]["change"] < 0 < answer["effects"]["math"]["change"]
    assert len(answer["files"]) == 2
    from headrace.mixtures.mixture_file.tolerant_read import read

    written = read(answer["files"][0]).mixture.phases["anneal"]
    assert written.weights == {k: v for k, v in answer["proposals"][0]["shares"].items() if v}
    assert written.tokens == 10_000 and written.lr.end == 0  # type: ignore[attr-defined]
    assert "already exists" in search(anneal, *words).output


def test_wrong_words_are_named(anneal: Path, tmp_path: Path) -> None:
    assert "which no measured mixture has" in search(anneal, "--max", "papers=0.1").output
    assert "not SOURCE=SHARE" in search(anneal, "--max", "web=2").output
    assert (
        "sum to less than 1"
        in search(anneal, *("--max", "web=0.1", "--max", "code=0.1", "--max", "math=0.1")).output
    )
    assert "need each other" in search(anneal, "--out", "x").output
    two = tmp_path / "two.yaml"
    two.write_text("phases: {a: {tokens: 1K}, b: {tokens: 1K}}\n")
    assert "there are 2" in search(anneal, "--mixture", two, "--out", tmp_path / "x").output


def test_what_is_no_ranking_is_named_with_what_is(
    anneal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, file in (("a", "run.yaml"), ("b", "run.yaml"), ("b-anneal", "anneal.json")):
        Path(folder).mkdir()
        Path(folder, file).touch()
    Path("c-anneal").mkdir()
    Path("c-anneal/scores.json").write_text(Path("scores.json").read_text())
    for place, hint in {
        "a": "a is a run: `trainer anneal a` measures mixtures, in a-anneal",
        "b-anneal": "run the same `trainer anneal` to its end",
        "c": "did you mean c-anneal?",
        "nosuch": "name the folder of a `trainer anneal`, by default RUN-anneal",
    }.items():
        output = search(place).output
        assert f"error: {place} has no scores of mixtures (scores.json)" in output
        assert hint in output
    assert search("c-anneal").exit_code == 0


def test_rankings_that_cannot_be_joined_are_refused(anneal: Path, tmp_path: Path) -> None:
    anneal_folder = tmp_path / "other"
    anneal_folder.mkdir()
    data = json.loads((anneal / "scores.json").read_text())
    (anneal_folder / "scores.json").write_text(json.dumps({**data, "weights": {"web": 1.0}}))
    with pytest.raises(MisuseError, match="other sources or weights"):
        load_scores([str(anneal), str(anneal_folder)])
    (anneal_folder / "scores.json").write_text(
        json.dumps({**data, "candidates": data["candidates"][:2]})
    )
    with pytest.raises(InputError, match="2 mixtures have a score; a regression needs 4"):
        load_scores([str(anneal_folder)])
    (anneal_folder / "scores.json").write_text("{}")
    with pytest.raises(InputError, match=r"is not a ranking of `trainer anneal`"):
        load_scores([str(anneal_folder)])
