from __future__ import annotations

import signal
import subprocess
import sys

from headrace.console.signals import deaf


def test_who_is_started_in_here_does_not_hear_and_we_do() -> None:
    code = "import signal; print(*signal.pthread_sigmask(signal.SIG_BLOCK, []))"
    with deaf():
        heard = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert heard.stdout.decode().split() == [str(int(signal.SIGINT))]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
