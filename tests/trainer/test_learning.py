"""A model learns from real text, and annealing improves its loss."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.trainer.guide.demo import write_code, write_prose

MODEL = """
vocab_size: 257
width: 64
pattern: "[attention] * 2"
mlp: glu
operators:
  attention: {kind: attention, heads: 4}
  glu: {kind: glu, hidden: 160}
"""
ANNEALED = """
sources: {{code: {{data: {code}}}, prose: {{data: {prose}}}}}
phases:
  stable:
    tokens: 240K
    seq_len: 128
    batch: 2Ki
    weights: {{code: 1}}
    lr: {{warmup: 16K}}
  anneal:
    tokens: 80K
    weights: {{stable: 0.5, prose: 0.5}}
    lr: {{shape: linear}}
"""
EVEN = """
sources: {{code: {{data: {code}}}, prose: {{data: {prose}}}}}
phases:
  all:
    tokens: 320K
    seq_len: 128
    batch: 2Ki
    weights: {{code: 0.875, prose: 0.125}}
    lr: {{warmup: 16K}}
"""


def headrace(command: str, *words: str) -> str:
    module = f"headrace.{command}.cli"
    done = subprocess.run(
        [sys.executable, "-m", module, *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_annealing_on_good_data_beats_the_same_tokens_without_it(tmp_path: Path) -> None:
    """Both runs take as many tokens of code and of prose: one evenly, all along; the other prose at
    the end alone, among replayed code, while the learning rate falls."""
    write_code(tmp_path / "code")
    write_prose(tmp_path / "prose")
    data = {}
    for name in ("code", "prose"):
        out = tmp_path / "data" / name
        words = ["--tokenizer", "byte", "--input-format", "text", "--split", "val=0.1"]
        headrace("tokenize", "build", str(tmp_path / name / "*"), "--out", str(out), *words)
        data[name] = out / "train"
    model = tmp_path / "model.yaml"
    model.write_text(MODEL)
    held_out = {}
    for name, text in (("annealed", ANNEALED), ("even", EVEN)):
        mixture = tmp_path / f"{name}.yaml"
        mixture.write_text(text.format(**data))
        words = ["--mixture", str(mixture), "--model", str(model), "--out", str(tmp_path / name)]
        words += ["optimizer.lr=5e-3", "engine.kind=fsdp2", "threads=1"]
        headrace("trainer", "run", *words, "evaluate.every=20", "evaluate.rows=48")
        lines = (tmp_path / name / "evaluations.jsonl").read_text().splitlines()
        first, last = json.loads(lines[0])["sources"], json.loads(lines[-1])["sources"]
        held_out[name] = {source: last[source]["loss"] for source in last}
        for source in last:
            assert last[source]["loss"] < 0.9 * first[source]["loss"], "it learns"
    for source in ("prose", "code"):
        assert held_out["annealed"][source] < held_out["even"][source], held_out
    runs = [str(tmp_path / name) for name in held_out]
    report = json.loads(headrace("trainer", "report", *runs, "--compare", "--json"))
    shown = [run["held_out"] for run in report["runs"]]
    assert shown[0] < shown[1]
    page = Path(report["report"]).read_text()
    assert "Held-out loss" in page and all(f"{loss:.4f}" in page for loss in shown)
