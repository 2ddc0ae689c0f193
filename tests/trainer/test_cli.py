from __future__ import annotations

import json
from typing import Any

from click.testing import CliRunner

from headrace.trainer.cli import main


def test_stop_after_must_be_positive() -> None:
    for command in (["run"], ["resume", "nowhere"]):
        result = CliRunner().invoke(main, [*command, "--stop-after", "0"])
        assert result.exit_code == 2 and "x>=1" in result.output


def test_resume_takes_processes_as_run_does(ask: Any) -> None:
    job = ask()
    job.folder.prepare()
    job.save()
    words = ["resume", str(job.folder.root), "--processes", "2", "--dry-run", "--json"]
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["layout"]["processes"] == 2
