"""A converted Savanna configuration is a run: `models show` and `--dry-run` accept it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.data.plan_data import write_head
from support.models.savanna_configs import FREEFORM, SHORT_MLP, STRIPED

from headrace.console import headrace
from headrace.trainer.cli import main


@pytest.mark.parametrize("text", [STRIPED, SHORT_MLP, FREEFORM])
def test_a_converted_configuration_passes_a_dry_run(tmp_path: Path, text: str) -> None:
    data = write_head(str(tmp_path / "genomes"), 10_000_000)
    (tmp_path / "model.yml").write_text(text)
    (tmp_path / "data.yml").write_text(f"train-data-paths: [{data}]\n")
    files = [str(tmp_path / "model.yml"), str(tmp_path / "data.yml")]
    out = tmp_path / "out"
    words = ["models", "convert", *files, str(out), "--format", "headrace", "--dp", "1"]
    result = CliRunner().invoke(headrace.main, words)
    assert result.exit_code == 0, result.output
    shown = CliRunner().invoke(headrace.main, ["models", "show", str(out / "model.yaml")])
    assert shown.exit_code == 0, shown.output
    names = ("--mixture", str(out / "mixture.yaml"), "--model", str(out / "model.yaml"))
    place = (
        "--out",
        str(tmp_path / "run"),
        "device=cpu",
        "watch.wandb=null",
        "--dry-run",
        "--json",
    )
    result = CliRunner().invoke(main, ["run", str(out / "run.yaml"), *names, *place])
    assert result.exit_code == 0, result.output
    about = json.loads(result.stdout)
    assert about["configuration"]["optimizer"]["decay"] == "savanna"
    spared = {name for row in about["groups"] if not row["weight_decay"] for name in row["names"]}
    assert not any(name.endswith(".skip") for name in spared)
