"""`--dry-run` checks what can be known before a start; this machine's limits are warnings."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest
from click.testing import CliRunner, Result
from moto.server import ThreadedMotoServer
from support.configs import CONFIGS

from headrace.trainer.cli import main

TINY = str(CONFIGS / "tiny.yaml")
SMALL = ("synthetic.steps=16", "synthetic.seq_len=8", "synthetic.batch_rows=4", "engine.kind=fsdp2")


@pytest.fixture(autouse=True)
def no_credentials(
    no_aws_credentials: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def dry(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(main, ["run", "--model", TINY, *SMALL, "--dry-run", *words])
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("words", [(), ("--slurm",)])
def test_a_logger_without_its_package_is_an_error(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "wandb").mkdir()  # as an earlier run leaves behind
    assert "wandb is not installed" in dry("watch.wandb=p", *words, code=1).stderr


def test_a_folder_named_as_the_package_is_not_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    assert "wandb is not installed" in dry("watch.wandb=p", code=1).stderr


def test_a_logger_without_credentials_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    error = dry("watch.wandb=p", code=1).stderr
    assert "no API key for api.wandb.ai" in error and "wandb login" in error
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password secret\n")
    dry("watch.wandb=p")
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert "no API key for wandb.example.org" in dry("watch.wandb=p", code=1).stderr
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    dry("watch.wandb=p")


def test_a_tracking_server_that_does_not_answer_is_an_error() -> None:
    pytest.importorskip("mlflow")
    with socket.socket() as taken:  # bound, not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        uri = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert f"{uri} does not answer" in dry(f"watch.mlflow={uri}", code=1).stderr


@pytest.mark.parametrize("words", [(), ("--slurm",)])
def test_a_store_of_checkpoints_without_credentials_is_an_error(words: tuple[str, ...]) -> None:
    error = dry("checkpoints.url=s3://bucket/run", *words, code=1).stderr
    assert "s3://bucket/run" in error and "credentials are missing" in error
    assert "Traceback" not in error


def test_a_store_of_checkpoints_is_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    try:
        host, port = server.get_host_and_port()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        error = dry("checkpoints.url=s3://dry-run/x", code=1).stderr
        assert "s3://dry-run/x: the bucket does not exist" in error
        fsspec.filesystem("s3").mkdir("dry-run")
        dry("checkpoints.url=s3://dry-run/x")
        assert fsspec.filesystem("s3").find("dry-run") == [], "nothing is written"
    finally:
        server.stop()
        fsspec.get_filesystem_class("s3").clear_instance_cache()


def test_the_limits_of_this_machine_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))
    many = ("--processes", "2048", "device=cuda", "synthetic.batch_rows=2048")
    shown = dry(*many, "--json")
    about = json.loads(shown.stdout)
    assert about["layout"]["processes"] == 2048 and about["layout"]["device"] == "cuda"
    assert len(about["warnings"]) == 2
    shown = dry(*many)
    assert "warning: a start on this machine would fail: 2048 processes need" in shown.stderr
    assert (
        "warning: a start on this machine would fail: runs/synthetic has 1 byte free"
        in shown.stderr
    )
    words = ["run", "--model", TINY, *SMALL]
    assert "1 byte free" in CliRunner().invoke(main, words).stderr, "a start is refused"


def test_a_folder_that_cannot_be_written_to_is_an_error(tmp_path: Path, read_only: Path) -> None:
    (tmp_path / "file").touch()
    assert "file is not a folder" in dry("--out", str(tmp_path / "file" / "run"), code=1).stderr
    error = dry("--out", str(read_only / "run"), code=1).stderr
    assert f"the file system of {read_only} is read-only" in error


def test_profiled_steps_must_be_in_the_plan() -> None:
    error = dry("--profile", "100:200", code=2).stderr
    assert "--profile 100:200: the plan has steps 0 to 15" in error
    dry("--profile", "10:100")


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # importing it fails
from headrace.trainer.cli import main
main()
"""


def test_a_second_dry_run_needs_no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a built or traced model gives is stored, and a rate decides nothing of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    dry("--json")
    words = ["optimizer.lr=0.5", "synthetic.steps=8", "--json"]

    def repeat(*more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT_TORCH, "run", "--model", TINY, *SMALL, "--dry-run"]
        return subprocess.run([*command, *words, *more], capture_output=True, text=True)

    done = repeat()
    assert done.returncode == 0, done.stderr
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    assert json.loads(done.stdout) == json.loads(dry(*words).stdout)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # Another model is counted.
    assert "this needs the package torch" in repeat("model.width=48").stderr
