"""Commands that are printed and run: their failures, and signals."""

import signal
import sys
from pathlib import Path

import pytest

from headrace.console.errors import RunError
from headrace.trainer.cluster.ranks import INTERRUPTED
from headrace.trainer.guide.shell import Shell


def test_a_command_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="ended with exit code 3"):
        Shell(tmp_path, "headrace demo").run(sys.executable, "-c", "raise SystemExit(3)")


@pytest.mark.parametrize("expected", [0, INTERRUPTED])
def test_sigterm_is_forwarded_to_the_running_command(tmp_path: Path, expected: int) -> None:
    child = (
        "import os, pathlib, signal, sys, time\n"
        "def save(*_):\n"
        "    time.sleep(0.5); pathlib.Path('saved').touch(); sys.exit(85)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "os.kill(os.getppid(), signal.SIGTERM)\n"
        "time.sleep(60)\n"
    )
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        Shell(tmp_path, "headrace demo").run(sys.executable, "-c", child, expected=[expected])
    assert (tmp_path / "saved").exists()
    assert signal.getsignal(signal.SIGTERM) is before
