"""`trainer plan` imports torch only to trace, and what it has traced lasts for later commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.data.small_data import random_documents, write_dataset
from support.planner.hardware import cpu_hardware

PROGRAM = """
import json
import sys


class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError(name + " is refused")


refuses_torch = sys.argv[2] == "refuse"
if refuses_torch:
    sys.meta_path.insert(0, Refuse())

from click.testing import CliRunner
from headrace.trainer.cli import main

found = []
for words in json.loads(sys.argv[1]):
    result = CliRunner().invoke(main, words)
    found.append([result.output, str(result.exception)])
print(json.dumps(found))
assert not (refuses_torch and "torch" in sys.modules)
"""


def run_commands(commands: list[list[str]], cache: Path, torch: str = "refuse") -> list[list[str]]:
    """Return output and exception of each command in one process, which may import torch or not."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(commands), torch],
        env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    result: list[list[str]] = json.loads(done.stdout)
    return result


@pytest.fixture
def commands(tmp_path: Path) -> list[list[str]]:
    """Commands that plan rows of one length, explain a layout, take another optimizer or precision,
    plan a mixture, and print the file that the others write."""
    write_dataset(str(tmp_path / "data"), random_documents(1, 60))
    mixture, run = tmp_path / "mixture.yaml", tmp_path / "run.yaml"
    phase = {"tokens": 256, "batch": 64, "weights": {"web": 1}}
    phases = {"short": {**phase, "seq_len": 16}, "long": {**phase, "seq_len": 32}}
    sources = {"web": {"data": str(tmp_path / "data")}}
    phases["short"]["lr"] = {"warmup": 64}
    mixture.write_text(yaml.safe_dump({"sources": sources, "phases": phases}))
    run.write_text(yaml.safe_dump({"optimizer": {"kind": "muon", "ema": 0.99}}))
    hardware = cpu_hardware(tmp_path)
    rows = ["--seq-len", "16", "--batch-tokens", "64"]
    fp8 = ["--seq-len", "64", "--batch-tokens", "1Ki", "--hardware", "h200", "--roofline"]
    narrow = tmp_path / "fp8.yaml"
    narrow.write_text(yaml.safe_dump({"precision": "fp8"}))
    arguments = [
        [*rows, "--hardware", hardware, "--gpus", "2"],
        [*rows, "--hardware", hardware, "--gpus", "2", "--explain", "pp=2", "--json"],
        [*rows, "--hardware", hardware, "--gpus", "1", "--run", str(run)],
        [*fp8, "--gpus", "4", "--run", str(narrow)],
        ["--mixture", str(mixture), "--hardware", hardware, "--gpus", "1"],
    ]
    file = str(tmp_path / "plan.yaml")
    model = ["plan", "--model", "tiny-transformer", "--out", file]
    return [*([*model, *words] for words in arguments), ["plan", "show", file]]


def test_a_plan_of_traced_models_needs_no_torch(commands: list[list[str]], tmp_path: Path) -> None:
    """The plans of a process that traces, and of one that reads its traces."""
    cache, file = tmp_path / "cache", tmp_path / "plan.yaml"
    cold = run_commands(commands, cache, torch="import")
    assert [error for _, error in cold] == ["None"] * len(commands), cold
    written = file.read_bytes()
    file.unlink()
    assert run_commands(commands, cache) == cold
    assert file.read_bytes() == written
    # Negative control: nothing is traced.
    errors = [error for _, error in run_commands(commands, tmp_path / "empty")]
    assert errors == ["torch is refused"] * (len(commands) - 1) + ["None"]
