from __future__ import annotations

import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from support.configs import CONFIGS

from headrace.console import config as reader
from headrace.console import yaml_text
from headrace.console.errors import MissingError, MisuseError, RunError
from headrace.trainer.cluster import slurm
from headrace.trainer.cluster.slurm import SlurmConfig, render_script
from headrace.trainer.launch import preflight as checks
from headrace.trainer.run.request import RunRequest
from headrace.trainer.run.resolve import resolve

TINY = str(CONFIGS / "tiny.yaml")


def lines(config: SlurmConfig, *words: str) -> list[str]:
    return render_script(config, "x", words, logs=Path("/logs"), cwd=Path("/here")).splitlines()


def test_sbatch_directives() -> None:
    result = lines(SlurmConfig(nodes=4, gpus=8, time="24:00:00", options={"mem": "0"}))
    for word in (
        "nodes=4",
        "ntasks-per-node=8",
        "gpus-per-node=8",
        "time=24:00:00",
        "requeue",
        "signal=USR1@300",
        "mem=0",
        "output=/logs/slurm-%j.out",
    ):
        assert f"#SBATCH --{word}" in result
    assert not any("account" in line or "partition" in line for line in result)
    assert not any(line.startswith("#SBATCH --gpus") for line in lines(SlurmConfig()))


def test_options_of_sbatch_may_be_numbers() -> None:
    config = reader.build(SlurmConfig, {"options": {"mem": 0, "qos": "low"}}, source="slurm")
    assert {"#SBATCH --mem=0", "#SBATCH --qos=low"} <= set(lines(config))


def test_options_of_sbatch_stay_as_they_are_written() -> None:
    """sbatch takes --mem=64000000 for 64 million megabytes."""
    data = reader.apply_overrides({}, ["options.mem=64M", "options.tmp=1T"])
    config = reader.build(SlurmConfig, data, source="slurm")
    assert {"#SBATCH --mem=64M", "#SBATCH --tmp=1T"} <= set(lines(config))
    assert yaml_text.parse(reader.dump(config), source="it")[0]["options"]["mem"] == "64M"


def test_odd_names_are_quoted_as_sbatch_reads_them() -> None:
    """A blank ends a value, `#` ends the line, and `%j` is the number of the job."""
    config = SlurmConfig(options={"comment": 'the "last" run'})
    text = render_script(config, "a b", [], logs=Path("/runs/a b#1%j"), cwd=Path("/"))
    assert {
        '#SBATCH --job-name="a b"',
        '#SBATCH --output="/runs/a b#1%%j/slurm-%j.out"',
        r'#SBATCH --comment="the \"last\" run"',
    } <= set(text.splitlines())


@pytest.mark.parametrize(
    "keys",
    [
        {"partition": "gpu\ntouch /made"},
        {"account": "a\rtouch /made"},
        {"options": {"mem\ntouch /made": "0"}},
        {"options": {"comment": "a\ntouch /made"}},
    ],
)
def test_only_setup_holds_commands(keys: dict[str, Any]) -> None:
    with pytest.raises(RunError, match="sbatch takes no option '--"):
        lines(SlurmConfig(**keys))


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("5", 300),
        ("5:30", 330),
        ("24:00:00", 86_400),
        ("2-12", 216_000),
        ("1-00:30", 88_200),
        ("1-01:01:01", 90_061),
        ("UNLIMITED", None),
        (None, None),
    ],
)
def test_time_limits_are_read_as_sbatch_reads_them(time: str | None, seconds: int | None) -> None:
    assert slurm.parse_time_limit(time) == seconds


def test_a_notice_that_covers_the_whole_job_is_refused() -> None:
    with pytest.raises(ValueError, match=r"notice is 300 .* time=5 is 300 seconds"):
        SlurmConfig(time="5")
    SlurmConfig(time="5", notice=299)


def test_the_script_repeats_the_typed_command(tmp_path: Path) -> None:
    result = "\n".join(
        lines(SlurmConfig(setup="module load cuda"), "run", "a b.yaml", "x={1: '2'}")
    )
    assert "run 'a b.yaml'" in result and "module load cuda\n" in result
    file = tmp_path / "script.sh"
    file.write_text(result)
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0


def test_the_layout_is_resolved_for_the_batch_job(tmp_path: Path) -> None:
    words = ["synthetic.batch_rows=32", "slurm.nodes=2", "slurm.gpus=8"]
    ask = RunRequest(model=TINY, out=str(tmp_path / "run"), overrides=words, slurm=True)
    result = resolve(ask)
    assert (result.run.device, result.run.precision, result.processes) == ("cuda", "bf16", 16)
    checks.check(result)  # this machine's devices do not matter
    with pytest.raises(MisuseError, match=r"processes=8, but a batch job of 2 × 8 has 16"):
        resolve(RunRequest(**{**vars(ask), "overrides": [*words, "processes=8"]}))


def test_without_sbatch_the_script_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="sbatch is not installed"):
        slurm.submit(tmp_path / "slurm.sh")


def test_an_error_of_sbatch_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path / "bin", "sbatch", "echo 'invalid partition' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with pytest.raises(RunError, match="invalid partition"):
        slurm.submit(tmp_path / "slurm.sh")


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/bash\n{text}\n")
    (folder / name).chmod(stat.S_IRWXU)


@pytest.mark.parametrize(
    ("note", "code", "state", "requeued"),
    [
        ("saved 40", 85, "RUNNING None", True),
        ("saved 40", 143, "RUNNING None", True),  # srun killed ranks that were exiting
        ("saved 40", 1, "RUNNING None", True),  # a rank was lost after the checkpoint
        ("saved 40", 85, "COMPLETING TimeLimit", True),
        ("saved 40", 85, "COMPLETING None", False),  # the job was cancelled
        ("saved 40", 85, "COMPLETING None PreemptTime=2026-11-26T19:37:21", True),
        ("failed 40", 1, "COMPLETING None PreemptTime=2026-11-26T19:37:21", False),
        ("saved 40", 85, "", False),
        ("finished 60", 143, "RUNNING None", False),
        ("stopped 40", 85, "RUNNING None", False),  # --stop-after
        ("failed 40", 1, "RUNNING None", False),
        ("", 85, "RUNNING None", False),  # nothing was saved: the next start would end alike
    ],
)
def test_the_note_of_the_run_decides(
    tmp_path: Path, note: str, code: int, state: str, requeued: bool
) -> None:
    bin, logs, asked = tmp_path / "bin", tmp_path / "logs", tmp_path / "asked"
    logs.mkdir()
    (logs / "slurm-77.note").write_text("saved 20\n")  # of an earlier start
    program(bin, "srun", f"[ -z '{note}' ] || echo '{note}' >$HEADRACE_NOTE; exit {code}")
    queue, _, preempted = state.partition(" PreemptTime=")
    program(bin, "squeue", f"echo '{queue}'")
    job = f"echo n1 PreemptTime={preempted or None}"
    program(bin, "scontrol", f'[ $1 = show ] && {job} || echo "$@" >>{asked}')
    text = render_script(SlurmConfig(), "x", ["run"], logs=logs, cwd=tmp_path)
    environment = {"PATH": f"{bin}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"}
    done = subprocess.run(["bash", "-c", text], env=environment, check=False)
    assert done.returncode == (0 if note.startswith("finished") else code)
    assert (asked.read_text() if asked.exists() else "") == "requeue 77\n" * requeued
