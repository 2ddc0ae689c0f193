"""The table of loggers: missing packages, and a dummy logger in `trainer run`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from support.configs import CONFIGS
from support.ranks import forked
from support.ranks.ports import free_ports

from headrace.console.errors import MissingError
from headrace.trainer.launch import preflight

TINY = CONFIGS / "tiny.yaml"

DUMMY = """
import json
from headrace.trainer.record.logger import Logger
from headrace.trainer.record.loggers import LOGGERS

class Dummy(Logger):
    calls = []
    def step(self, metrics, ledger):
        self.calls.append(["step", metrics["step"], ledger["hash"]])
    def event(self, entry):
        self.calls.append(["event", entry["event"], entry["step"]])
    def close(self):
        (self.run.folder.root / "dummy.json").write_text(json.dumps(self.calls))

LOGGERS["dummy"] = Dummy
"""


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_extra_is_found_before_the_start(
    ask: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    preflight.check(ask())
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingError, match=rf"watch\.{name} is set, and {name}") as caught:
        preflight.check(ask(f"watch.{name}=rivers"))
    assert caught.value.hint == f"pip install 'headrace[{name}]'"


@pytest.mark.slow
def test_a_logger_of_the_table_gets_a_run(tmp_path: Path) -> None:
    words = ["run", "--model", str(TINY), "--out", str(tmp_path / "run"), "threads=1"]
    words += ["synthetic.steps=2", "synthetic.seq_len=16", "synthetic.batch_rows=4"]
    words += ["engine.kind=fsdp2", "watch.tensorboard=false"]
    port = str(free_ports())
    # As torchrun starts a rank: the command itself trains, in the process that has the dummy.
    rank = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    plugin = tmp_path / "dummy_logger.py"
    plugin.write_text(DUMMY)
    command = [sys.executable, "-m", "headrace.trainer.cli", *words]
    done = forked.run(command, env={**os.environ, **rank}, plugin=plugin)
    assert done.returncode == 0, done.stderr
    hashes = [
        json.loads(line)["hash"]
        for line in (tmp_path / "run" / "ledger.jsonl").read_text().splitlines()
    ]
    logged = json.loads((tmp_path / "run" / "dummy.json").read_text())
    assert ["event", "memory", 0] in logged
    assert [item for item in logged if item[1] != "memory"] == [
        ["event", "start", 0],
        ["step", 0, hashes[0]],
        ["event", "first step", 0],
        ["step", 1, hashes[1]],
        ["event", "checkpoint", 2],
        ["event", "finish", 2],
    ]
