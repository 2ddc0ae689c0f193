"""An installation without extras: what it imports, and what it says about training."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from test_house import ROOT

from headrace.console.command import TRAINING

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
BLOCK = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        known = top in ALLOWED or top in sys.stdlib_module_names or top.startswith("_sysconfig")
        if not known:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Block())
"""
TEXT = "the water turns the wheel of the mill by night and day\n"


def closure(names: list[str]) -> set[str]:
    """Return these distributions and all that they require."""
    done: set[str] = set()
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in done:
            continue
        done.add(name)
        try:
            requirements = metadata.distribution(name).requires or []
        except metadata.PackageNotFoundError:  # a marker of another system
            continue
        for requirement in map(Requirement, requirements):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                names.append(requirement.name)
    return done


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder for PYTHONPATH, in which Python finds only what the requirements install."""
    distributions = closure([Requirement(text).name for text in PROJECT["dependencies"]])
    tops = {
        top
        for top, names in metadata.packages_distributions().items()
        if {re.sub(r"[-_.]+", "-", name).lower() for name in names} & distributions
    }
    assert {"numpy", "pyarrow", "yaml"} <= tops and not tops & set(TRAINING)
    folder = tmp_path_factory.mktemp("site")
    allowed = sorted({*tops, "headrace", "sitecustomize", "zstandard"})
    (folder / "sitecustomize.py").write_text(f"ALLOWED = {allowed}\n{BLOCK}")
    return folder


def run(site: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "headrace.console.headrace", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )


def test_datasets_mixtures_and_audits_need_no_extra(site: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{number} {TEXT * 9}"}) for number in range(200)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    for command in (
        "tokenize train a.jsonl --vocab-size 300 --out bpe.json",
        "tokenize build a.jsonl --tokenizer bpe.json --split val=0.1 --out data",
        "mixtures new data/train --out m.yaml --seq-len 64",
        "mixtures plan m.yaml --out plan.json",
        "mixtures audit plan.json --rows 0:4 --text",
    ):
        result = run(site, tmp_path, *command.split())
        assert result.returncode == 0, f"{command}\n{result.stderr}"


def test_training_names_the_extra_that_it_needs(site: Path, tmp_path: Path) -> None:
    result = run(site, tmp_path, "trainer", "run", "synthetic.steps=1", "--out", "run")
    assert result.returncode == 1
    assert result.stderr.endswith(
        "error: this needs the package torch\n  hint:  pip install 'headrace[train]'\n"
    )
    debug = run(site, tmp_path, "--debug", "trainer", "run", "synthetic.steps=1", "--out", "run")
    assert "Traceback" in debug.stderr


def test_the_extra_train_is_what_the_error_names() -> None:
    extra = PROJECT["optional-dependencies"]["train"]
    assert {Requirement(text).name for text in extra} == set(TRAINING)
