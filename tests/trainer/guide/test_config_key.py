"""`headrace config KEY`, for every key that a file may have."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.console.headrace import main
from headrace.trainer.cli import keys
from headrace.trainer.guide.config_key import meanings


def explain(*words: str, code: int = 0) -> str:
    run = CliRunner().invoke(main, ["config", *words])
    assert run.exit_code == code, run.output
    return run.output


def test_every_key_has_a_meaning() -> None:
    known = list(keys())
    assert len(known) > 200
    without = [key for key in known if not (found := meanings(key)) or not found[0].type]
    assert not without
    assert not [key for key in known if "Annotated" in meanings(key)[0].type]


def test_types_are_shown_without_marks_of_the_reader() -> None:
    assert explain("optimizer").startswith("optimizer: OptimizerConfig, default")
    assert explain("slurm.options").startswith("slurm.options: Mapping[str, str | int], default {}")


def test_a_key_is_explained_by_its_code() -> None:
    text = explain("checkpoints.keep_last")
    assert "checkpoints.keep_last: int, default 3 (CheckpointConfig)" in text
    assert "Number of the newest checkpoints to keep." in text
    rate = explain("optimizer.lr")
    assert rate.count("Peak learning rate") == 1
    assert "AdamWConfig, MuonConfig" in rate
    assert "default 'auto' (" in explain("model.operators.NAME.kernel")
    assert "keys: " in explain("watch")


def test_a_file_that_says_the_kind_leaves_the_meaning_of_this_kind(tmp_path: Path) -> None:
    model = tmp_path / "model.yaml"
    model.write_text("operators:\n  a: {kind: attention, heads: 4}\n  m: {kind: mamba1}\n")
    (tmp_path / "run.yaml").write_text("optimizer: {kind: muon}\n")
    key = "model.operators.a.heads"
    assert "Mamba1Options" in explain(key)
    for place in (model, tmp_path):
        text = explain(key, str(place))
        assert "(AttentionOptions)" in text and text.count(key) == 1
        assert f"{model}, line 2: 4" in text
    text = explain("model.operators.m.heads", str(model))
    assert "(Mamba1Options)" in text and "AttentionOptions" not in text
    assert "AttentionOptions" in explain("model.operators.NAME.heads", str(model))
    assert "(MuonConfig)" in explain("optimizer.lr", str(tmp_path))


def test_the_line_that_sets_a_key(tmp_path: Path) -> None:
    run = tmp_path / "run.yaml"
    run.write_text("seed: 1\noptimizer:\n  lr: 0.002\n")
    assert f"{run}, line 3: 0.002" in explain("optimizer.lr", str(run))
    assert f"{run} does not set it" in explain("checkpoints.keep_last", str(run))
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text("phases:\n  a: {tokens: 5}\n  b:\n    tokens: 7\n")
    text = explain("mixture.phases.NAME.tokens", str(mixture))
    assert f"{mixture}, line 2: 5" in text
    assert f"{mixture}, line 4: 7" in text
    only = explain("mixture.phases.b.tokens", str(mixture), "--json")
    assert json.loads(only)["set"] == f"{mixture}, line 4: 7"
    assert f"{tmp_path}/run.yaml, line 1: 1" in explain("seed", str(tmp_path))


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("optimizer.lrr", "optimizer.lr"),
        ("keep_last", "checkpoints.keep_last"),
        ("model.vocab", "model.vocab_size"),
    ],
)
def test_an_unknown_key_is_named_with_a_near_one(key: str, near: str) -> None:
    text = explain(key, code=2)
    assert f"there is no key {key}" in text
    assert near in text
