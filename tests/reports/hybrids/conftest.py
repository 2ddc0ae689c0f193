"""A corpus, its held-out split, and two models of equal parameters."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.ranks import forked

from headrace.reports.hybrids import train
from headrace.tokenize.cli import main as tokenize

MODEL = """
vocab_size: 257
width: 16
pattern: "[mixer]"
mlp: glu
operators:
  mixer: {{kind: {mixer}}}
  glu: {{kind: glu, hidden: {hidden}}}
"""
MIXTURE = """
sources: {letters: {data: data/letters/train}}
phases: {train: {tokens: 4K, seq_len: 128, batch: 512, weights: {letters: 1}}}
"""
ATTENTION = "attention, heads: 2"
DELTA = "delta, heads: 2, key_head_dim: 4, value_head_dim: 8, chunk: 16"
RUN = """
engine: {kind: fsdp2}
processes: 1
threads: 1
optimizer: {lr: 1e-2}
evaluate: {every: 1, rows: 4}
watch: {tensorboard: false}
"""


def run_trainer(arguments: Sequence[str]) -> int:
    return forked.run([sys.executable, "-m", "headrace.trainer.cli", *arguments]).returncode


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("hybrids")
    here = Path.cwd()
    os.chdir(root)
    try:
        chance = random.Random(1)
        lines = ["".join(chance.choices("abcdefgh", k=200)) for _ in range(100)]
        Path("letters.txt").write_text("\n".join(lines))
        words = ["build", "letters.txt", "--text-documents", "line", "--tokenizer", "byte"]
        done = CliRunner().invoke(tokenize, [*words, "--split", "val=0.2", "--out", "data/letters"])
        assert done.exit_code == 0, done.output
        files = {
            "plain": MODEL.format(mixer=ATTENTION, hidden=32),
            "gdn": MODEL.format(mixer=DELTA, hidden=28),
            "wide": MODEL.format(mixer=ATTENTION, hidden=48),
            "mixture": MIXTURE,
            "run": RUN,
        }
        for name, text in files.items():
            Path(f"{name}.yaml").write_text(text)
    finally:
        os.chdir(here)
    return root


@pytest.fixture
def inside(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(train, "run_trainer", run_trainer)
    return folder
