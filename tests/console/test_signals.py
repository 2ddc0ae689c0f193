"""Children started with SIGINT blocked do not receive Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys

from headrace.console.signals import sigint_blocked


def test_sigint_is_blocked_in_children_and_not_in_the_parent() -> None:
    code = "import signal; print(*signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with sigint_blocked():
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert child.stdout.decode().split() == [str(int(signal.SIGINT))]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
