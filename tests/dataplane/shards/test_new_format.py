"""A new shard format is a module and a line in a table: no other file names the formats."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from support.data.small_data import plan_of

from headrace.dataplane.loader.loader import Loader
from headrace.dataplane.shards import FORMATS, FormatEntry
from headrace.tokenize.cli import main

DUMMY = FormatEntry("support.data.dummy_shard_format")
COMMAND = f"""
from headrace.dataplane.shards import FORMATS, FormatEntry
FORMATS["dummy"] = {DUMMY!r}
if __name__ == "__main__":
    from headrace.tokenize.cli import main
    main()
"""
"""`tokenize`, with the line of the new format in the table of formats."""
ALONE = ("--workers", "1", "--json")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    texts = [f"document {number} " + "water " * (number % 17) for number in range(200)]
    lines = [json.dumps({"text": text, "name": f"#{k}"}) for k, text in enumerate(texts)]
    path.write_text("\n".join(lines) + "\n")
    return path


def tokenize(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    script = folder / "tokenize_with_dummy.py"
    script.write_text(COMMAND)
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def rows(url: Path) -> np.ndarray:
    plan = plan_of(
        {
            "seed": 7,
            "chunk": 256,
            "window": 2,
            "sources": {"water": {"data": str(url)}},
            "phases": {"p": {"tokens": 4096, "seq_len": 64, "batch": 512, "weights": {"water": 1}}},
        }
    )
    loader = Loader(plan, micro_batch=4)
    return np.concatenate([batch.tokens for step in loader for batch in step])


def test_a_new_format_is_built_verified_inspected_indexed_and_loaded(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, usual = tmp_path / "out", tmp_path / "usual"
    options = ["--tokenizer", "byte", "--id-field", "name", "--shard-size", "4Ki", *ALONE]
    built = tokenize(tmp_path, "build", corpus, *options, "--out", out, "--format", "dummy")
    assert built.returncode == 0, built.stderr
    assert len(list((out / "shards").glob("*.dummy"))) > 1

    monkeypatch.setitem(FORMATS, "dummy", DUMMY)  # commands without --format run in this process
    assert json.loads(invoke("verify", out, *ALONE).stdout) == []
    shown = json.loads(invoke("inspect", out, "--document", 3, "--json").stdout)
    assert shown["format"] == "dummy" and shown["documents"] == 200
    assert shown["shown"][0]["origin"] == {"file": str(corpus), "position": 3, "id": "#3"}
    assert shown["shown"][0]["text"].startswith("document 3 water")

    result = invoke("build", corpus, *options, "--out", usual)
    assert result.exit_code == 0, result.output
    np.testing.assert_array_equal(rows(out), rows(usual))  # the storage does not decide the order

    (out / "listing.json").write_text("[]")
    (damage,) = json.loads(invoke("verify", out, *ALONE).stdout)
    assert damage["name"] == "listing.json" and damage["what"] == "it lists other shards"

    (out / "manifest.json").unlink()
    again = tokenize(tmp_path, "index", out, "--format", "dummy", *ALONE)
    assert again.returncode == 0, again.stderr
    indexed = json.loads(again.stdout)
    assert (indexed["format"], indexed["documents"]) == ("dummy", 200)
    assert indexed["tokens"] == shown["tokens"]


def test_the_formats_of_the_command_are_those_of_the_table(corpus: Path, tmp_path: Path) -> None:
    refused = tokenize(
        tmp_path, "build", corpus, "--tokenizer", "byte", "--out", "o", "--format", "megatron"
    )
    assert refused.returncode == 2
    assert "'megatron' is not one of 'arrow', 'dummy', 'mds'" in refused.stderr
