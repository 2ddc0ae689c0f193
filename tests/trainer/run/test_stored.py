"""A run of eight GPUs, read on a machine without any."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from support.ranks import forked

from headrace.console import config as reader
from headrace.console.errors import RunError
from headrace.dataplane.order.plan import Plan
from headrace.mixtures.cli import main as mixtures
from headrace.tokenize.cli import main as tokenize
from headrace.trainer.cli import main
from headrace.trainer.folders.folder import RunFolder
from headrace.trainer.run.stored import read_run

MODEL = ["--model", "tiny-transformer", "model.vocab_size=264"]


@pytest.fixture(scope="session")
def gpu_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run that was trained here, and whose run.yaml says that eight GPUs trained it."""
    folder = tmp_path_factory.mktemp("gpu")
    (folder / "corpus.txt").write_text("the river runs to the wheel\n" * 200)
    words = ["--tokenizer", "byte", "--out", str(folder / "data")]
    assert (
        CliRunner().invoke(tokenize, ["build", str(folder / "corpus.txt"), *words]).exit_code == 0
    )
    mixture = {
        "sources": {"river": {"data": str(folder / "data")}},
        "phases": {"all": {"tokens": 2048, "seq_len": 64, "batch": 512, "weights": {"river": 1}}},
    }
    (folder / "mixture.yaml").write_text(reader.dump(mixture))
    command = [sys.executable, "-m", "headrace.trainer.cli", *start(folder)]
    done = forked.run(command)
    assert done.returncode == 0, done.stderr
    run = RunFolder(folder / "run")
    data, _ = reader.read_yaml(run.run)
    gpus = {"device": "cuda", "precision": "bf16", "processes": 8}
    run.run.write_text(reader.dump({**data, **gpus}))
    run.about.unlink()  # it counts for one process
    return run


def start(folder: Path) -> list[str]:
    small = ["engine.kind=fsdp2", "threads=1", "watch.tensorboard=false"]
    out = ["--mixture", str(folder / "mixture.yaml"), "--out", str(folder / "run")]
    return ["run", *MODEL, *out, *small]


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def trainer(*words: object) -> Result:
    return CliRunner().invoke(main, [str(word) for word in words])


@pytest.mark.slow
def test_report_shows_the_ranks_of_the_run(gpu_run: RunFolder) -> None:
    done = trainer("report", gpu_run.root, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["runs"][0]["steps"] == 4
    text = gpu_run.report.read_text()
    assert "8 × cuda = pp 1 × dp 8 × tp 1 × cp 1" in text and "FSDP2, bf16" in text
    script = (  # the facts were counted once, and kept
        "import sys; from headrace.trainer.cli import main; "
        f"main(['report', {str(gpu_run.root)!r}], standalone_mode=False); "
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
    assert "8 × cuda" in gpu_run.report.read_text()


@pytest.mark.slow
def test_runs_are_compared(gpu_run: RunFolder, tmp_path: Path) -> None:
    shutil.copytree(gpu_run.root, tmp_path / "other")
    done = trainer("report", gpu_run.root, tmp_path / "other", "--compare", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["runs"][1]["first_difference"] is None


@pytest.mark.slow
def test_audit_proves_a_step(gpu_run: RunFolder) -> None:
    done = CliRunner().invoke(mixtures, ["audit", str(gpu_run.root), "--step", "2", "--json"])
    assert done.exit_code == 0, done.output


@pytest.mark.slow
def test_weights_are_exported(gpu_run: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "stated.yaml").write_text("provider: {name: Mill Ltd}\n")
    stated = f"--statement={tmp_path / 'stated.yaml'}"
    done = trainer("export", gpu_run.root, tmp_path / "out", stated, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["summary"] == "SUMMARY.md"
    assert "| Provider name | Mill Ltd |" in (tmp_path / "out" / "SUMMARY.md").read_text()
    assert (tmp_path / "out" / "model.safetensors").exists()
    page = (tmp_path / "out" / "README.md").read_text()
    assert f"# Training data of plan {Plan.load(gpu_run.plan).hash[:16]}" in page


@pytest.mark.slow
def test_the_model_is_sampled(gpu_run: RunFolder) -> None:
    done = trainer("sample", gpu_run.root, "--prompt", "the ", "--tokens", 2, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["samples"][0]["prompt"] == "the "


@pytest.mark.slow
def test_a_resume_is_refused_with_a_hint_that_works(gpu_run: RunFolder) -> None:
    refused = trainer("resume", gpu_run.root)
    assert refused.exit_code == 1
    assert "device=cuda, and torch finds no GPU" in refused.output
    assert "hint:  set device=cpu" in refused.output
    here = trainer("resume", gpu_run.root, "device=cpu", "processes=1", "--dry-run", "--json")
    assert here.exit_code == 0, here.output
    layout = json.loads(here.stdout)["layout"]
    assert (layout["device"], layout["processes"], layout["precision"]) == ("cpu", 1, "bf16")


@pytest.mark.slow
def test_the_first_command_continues_it_on_cpu(gpu_run: RunFolder) -> None:
    words = [*start(gpu_run.root.parent), "device=cpu", "precision=bf16", "--dry-run", "--json"]
    here = trainer(*words)
    assert here.exit_code == 0, here.output
    assert json.loads(here.stdout)["begun"]


def test_a_run_that_is_not_resolved_is_refused(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.run.write_text("device: cuda\n")
    folder.checkpoints.mkdir()
    with pytest.raises(RunError, match="is not resolved: processes, device and precision"):
        read_run(folder)
