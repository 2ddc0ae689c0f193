"""The URL of a build with splits, given to the commands that read a dataset."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.data.corpora import texts, write_jsonl

from headrace.dataplane.datasets import manifest
from headrace.tokenize.cli import main


@pytest.fixture
def out(tmp_path: Path) -> str:
    write_jsonl(tmp_path / "a.jsonl", ["", *texts(40)])
    build = f"build {tmp_path}/a.jsonl --tokenizer byte --split val=0.3 --split test=0.2"
    return run(f"{build} --workers 1 --out {tmp_path}/out") and f"{tmp_path}/out"


def run(line: str) -> str:
    result = CliRunner().invoke(main, line.split())
    assert result.exit_code == 0, result.output
    return result.output


def test_inspect_and_card_show_every_split(out: str) -> None:
    shown = run(f"inspect {out}")
    assert [line for line in shown.splitlines() if line.startswith(out)] == [
        f"{out}/{name}" for name in ("train", "test", "val")
    ]
    assert "counts of train, test and val together:" in shown
    assert [entry["url"] for entry in json.loads(run(f"inspect {out} --json"))] == [
        f"{out}/{name}" for name in ("train", "test", "val")
    ]
    page = run(f"card {out} --license MIT")
    for name in ("train", "test", "val"):
        assert f"# Dataset out/{name}" in page
    assert page.count("Licences: MIT") == 3
    assert page.count("## Left out by the build (train, test and val together)") == 3
    assert run(f"card {out}/val") in page


@pytest.mark.parametrize("command", ["select --where tokens>150", "pack --length 512"])
def test_a_view_of_splits_is_a_view_of_each(out: str, command: str, tmp_path: Path) -> None:
    verb, option = command.split(" ", 1)
    said = run(f"{verb} {out} {option} --out {tmp_path}/view --workers 1")
    alone = run(f"{verb} {out}/val {option} --out {tmp_path}/alone --workers 1")
    assert alone.splitlines()[-1].split(": ", 1)[1] in said
    for name in ("train", "test", "val"):
        assert f"{tmp_path}/view/{name}: " in said
    assert manifest.load(f"{tmp_path}/view/val").tokens == manifest.load(f"{tmp_path}/alone").tokens
    assert len(json.loads(run(f"inspect {tmp_path}/view --json"))) == 3
