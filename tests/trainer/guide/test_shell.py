"""Commands that are printed and run: their failures, and signals."""

import signal
import subprocess
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


@pytest.mark.parametrize("code", [130, INTERRUPTED])
def test_an_interruption_is_said_once(tmp_path: Path, code: int) -> None:
    """Ctrl-C reaches the command too. One that ends with 130 has said so; a run says what it
    saved."""
    program = (
        "from pathlib import Path\n"
        "from headrace.console import command\n"
        "from headrace.trainer.guide.shell import Shell\n"
        "child = 'import os, signal, sys, time\\n'\\\n"
        f"  'def end(*_):\\n  print(*[\"interrupted\"] * ({code} == 130), file=sys.stderr)\\n'\\\n"
        f"  '  sys.exit({code})\\n'\\\n"
        "  'signal.signal(signal.SIGINT, end)\\n'\\\n"
        "  'os.kill(os.getppid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGINT)\\n'\\\n"
        "  'time.sleep(60)'\n"
        "@command.group('test')\n"
        "def main(): pass\n"
        "@main.command()\n"
        "def go(): Shell(Path(), 'test').run(__import__('sys').executable, '-c', child)\n"
        "main()\n"
    )
    words = [sys.executable, "-c", program, "go"]
    result = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 130, result.stderr
    assert result.stderr.count("interrupted\n") == 1
    assert "to go on, run the same `test` again" in result.stderr
