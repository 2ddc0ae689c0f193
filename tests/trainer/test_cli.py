from __future__ import annotations

from click.testing import CliRunner

from headrace.trainer.cli import main


def test_a_run_takes_a_step_at_least() -> None:
    for command in (["run"], ["resume", "nowhere"]):
        result = CliRunner().invoke(main, [*command, "--stop-after", "0"])
        assert result.exit_code == 2 and "x>=1" in result.output
