"""`headrace config KEY`, for every key that a file may have."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.console import config as reader
from headrace.console import yaml_text
from headrace.console.headrace import main
from headrace.trainer.cli import keys
from headrace.trainer.guide.config_key import find_meanings
from headrace.trainer.run.config import RunConfig


def explain(*words: str, code: int = 0) -> str:
    run = CliRunner().invoke(main, ["config", *words])
    assert run.exit_code == code, run.output
    return run.output


def test_every_key_has_a_type_and_a_default_of_yaml() -> None:
    """No type names a class of Python, and YAML reads a default back."""
    meanings_by_key = {key: find_meanings(key) for key in keys()}
    assert len(meanings_by_key) > 200 and all(meanings_by_key.values())
    meanings = [meaning for meanings in meanings_by_key.values() for meaning in meanings]
    words = r"int|float|bool|str|null|value|keys( by \w+)?|dict|list|\d|\"[^\"]*\"|[|\[\], ]+"
    assert not {meaning.type for meaning in meanings if re.sub(words, "", meaning.type)}
    for meaning in meanings:
        if not meaning.required:
            assert yaml_text.value(meaning.default_text) == meaning.default


def test_a_default_that_is_typed_changes_nothing() -> None:
    names = [field.name for field in dataclasses.fields(RunConfig) if field.init]
    defaults = {name: find_meanings(name)[0].default for name in names}
    assert defaults["engine"] == {"kind": "deepspeed"} and defaults["checkpoints"] == {}
    assert reader.build(RunConfig, defaults, source="defaults") == RunConfig()


def test_types_are_shown_without_classes_of_python() -> None:
    assert explain("optimizer").startswith('optimizer: keys by kind, default {"kind": "adamw"}\n')
    assert explain("slurm.options").startswith("slurm.options: dict[str, str | int], default {}")
    assert '"auto" | "' in explain("precision")
    assert "kind: str, required" not in explain("engine.kind")  # that of no engine


def test_a_key_is_explained_by_its_code() -> None:
    text = explain("checkpoints.keep_last")
    assert "checkpoints.keep_last: int, default 3\n" in text
    assert "Number of the newest checkpoints to keep." in text
    rate = explain("optimizer.lr")
    assert rate.count("Peak learning rate") == 1
    assert "(kinds: adamw, muon)" in rate
    assert 'default "auto" (kinds: attention, ' in explain("model.operators.NAME.kernel")
    assert "keys: " in explain("watch")


def test_a_file_that_says_the_kind_leaves_the_meaning_of_this_kind(tmp_path: Path) -> None:
    model = tmp_path / "model.yaml"
    model.write_text("operators:\n  a: {kind: attention, heads: 4}\n  m: {kind: mamba1}\n")
    (tmp_path / "run.yaml").write_text("optimizer: {kind: muon}\n")
    key = "model.operators.a.heads"
    assert "mamba1" in explain(key)
    for place in (model, tmp_path):
        text = explain(key, str(place))
        assert "(kinds: attention)" in text and text.count(key) == 1
        assert f"{model}, line 2: 4" in text
    text = explain("model.operators.m.heads", str(model))
    assert "(kinds: mamba1)" in text and "attention" not in text
    assert "attention" in explain("model.operators.NAME.heads", str(model))
    assert "(kinds: muon)" in explain("optimizer.lr", str(tmp_path))


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
