"""A rank ends with its exit code, whatever threads are in native code then."""

from __future__ import annotations

import subprocess
import sys

import pytest

RANK = """
import atexit, sys, threading, time
from headrace.trainer.cluster.end import PlainEnd

end = PlainEnd()
import torch
from datetime import timedelta
from torch.distributed import TCPStore

atexit.register(print, "the handlers have run")
store = TCPStore("127.0.0.1", 0, 1, True, timeout=timedelta(seconds=5))
beginning = threading.Event()

def wait() -> None:
    while True:
        beginning.set()
        try:
            store.wait(["nothing"], timedelta(milliseconds=3))
        except Exception:
            pass

class Slow:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)

slow = Slow()  # Python clears it when no other thread may run: the thread comes out of torch then
threading.Thread(target=wait, daemon=True).start()
beginning.wait()
if sys.argv[1] == "plain":
    end.code = 85
sys.exit(85)
"""


def end(kind: str) -> subprocess.CompletedProcess[str]:
    run = subprocess.run([sys.executable, "-c", RANK, kind], capture_output=True, text=True)
    assert run.stdout == "the handlers have run\n"
    return run


@pytest.mark.slow
def test_a_thread_in_torch_does_not_abort_the_plain_end() -> None:
    run = end("plain")
    assert run.returncode == 85, run.stderr


@pytest.mark.slow
def test_a_thread_in_torch_aborts_the_usual_end() -> None:
    """Python unwinds the thread, and C++ aborts the process."""
    run = end("usual")
    assert run.returncode == -6
    assert "terminate called without an active exception" in run.stderr
