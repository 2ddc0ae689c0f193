"""A run that an older version saved (commit 924fcd4, AdamW, ZeRO-1) is read and resumed.

`old_run/` is its folder after step 3 of 6; the losses are those of that version's own resume.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from support.configs import CONFIGS
from support.ranks import forked

from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.run.request import Request
from headrace.trainer.run.resolve import load, resolve

FOLDER = Path(__file__).with_name("old_run")
LOSSES = [3.4571438431739807, 3.480817496776581, 3.4889142513275146]
LEDGER = "347bfdc07fba680bd7a58ebd616d6c02"


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["engine.kind=fsdp2"]], ids=str)
def test_an_old_checkpoint_resumes_with_its_moments(tmp_path: Path, words: list[str]) -> None:
    run = tmp_path / "run"
    shutil.copytree(FOLDER, run)
    command = [sys.executable, "-m", "headrace.trainer.cli", "resume", str(run), *words]
    done = forked.run(command)
    assert done.returncode == 0, done.stderr
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [entry["loss"] for entry in metrics[3:]] == pytest.approx(LOSSES, rel=1e-6)
    assert json.loads((run / "ledger.jsonl").read_text().splitlines()[-1])["hash"] == LEDGER


def test_an_old_run_keeps_its_identity(tmp_path: Path) -> None:
    """A run whose folder was lost is found at its `checkpoints.url` by its identity."""
    tiny = str(CONFIGS / "tiny.yaml")
    words = ["synthetic.steps=6", "synthetic.seq_len=16", "synthetic.batch_rows=4", "seed=3"]
    base = ["device=cpu", *words]

    def identity(*more: str) -> str:
        request = Request(model=tiny, out=str(tmp_path / "run"), overrides=[*base, *more])
        return resolve(request).identity

    assert identity() == "4b9fbc0536766f5147f53681774a2976"  # computed by commit 924fcd4
    assert identity("optimizer.kind=muon") != identity()
    assert identity("optimizer.ema=0.99") != identity()
    assert identity("optimizer.groups=[{match: '*', lr: 0.5}]") != identity()


def test_an_old_run_is_read_as_it_stands() -> None:
    assert load(RunFolder(FOLDER)).run.optimizer.kind == "adamw"
