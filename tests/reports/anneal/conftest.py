"""A run of eight steps, and mixtures that continue it."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.ranks import forked

from headrace.reports.anneal import train
from headrace.tokenize.cli import main as tokenize

MODEL = """
vocab_size: 257
width: 16
pattern: "[attention]"
mlp: glu
operators:
  attention: {kind: attention, heads: 2}
  glu: {kind: glu, hidden: 32}
"""
MIXTURE = """
sources: {letters: {data: data/letters/train}, digits: {data: data/digits/train, max_epochs: 9}}
phases:
  stable: {tokens: 4K, seq_len: 64, batch: 512, weights: {letters: 0.9, digits: 0.1}}
"""
WITH_SIGNS = """
sources: {signs: {data: data/signs/train, max_epochs: 9}}
phases: {anneal: {tokens: 4K, weights: {stable: 0.5, signs: 0.5}, lr: {shape: linear}}}
"""
WITH_DIGITS = """
phases: {anneal: {tokens: 4K, weights: {stable: 0.5, digits: 0.5}, lr: {shape: linear}}}
"""
PROCESSES = ("engine.kind=fsdp2", "threads=1", "optimizer.lr=1e-2", "watch.tensorboard=false")


def run_trainer(arguments: Sequence[str]) -> int:
    return forked.run([sys.executable, "-m", "headrace.trainer.cli", *arguments]).returncode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three corpora, their datasets with held-out splits, mixtures, and a run of eight steps."""
    root = tmp_path_factory.mktemp("anneal")
    here = Path.cwd()
    os.chdir(root)
    try:
        for name, letters in (("letters", "abcdefgh"), ("digits", "0123456789"), ("signs", "+-*/")):
            chance = random.Random(name)
            lines = ["".join(chance.choices(letters, k=120)) for _ in range(100)]
            records = ({"id": f"{name}-{n}", "text": line} for n, line in enumerate(lines))
            text = "".join(json.dumps(record) + "\n" for record in records)
            Path(f"{name}.jsonl").write_text(text)
            words = [
                "build",
                f"{name}.jsonl",
                "--tokenizer",
                "byte",
                "--split",
                "val=0.1",
                "--id-field",
                "id",
            ]
            done = CliRunner().invoke(tokenize, [*words, "--out", f"data/{name}"])
            assert done.exit_code == 0, done.output
        files = {"main": MIXTURE, "signs": WITH_SIGNS, "digits": WITH_DIGITS, "model": MODEL}
        for name, text in files.items():
            Path(f"{name}.yaml").write_text(text)
        words = ["run", "--mixture", "main.yaml", "--model", "model.yaml", "--out", "main"]
        assert run_trainer([*words, *PROCESSES]) == 0
    finally:
        os.chdir(here)
    return root


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(train, "run_trainer", run_trainer)
    return folder
