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

threading.Thread(target=wait, daemon=True).start()
beginning.wait()
time.sleep(0.1)
if sys.argv[1] == "plain":
    end.code = 85
sys.exit(85)
"""


TRIES = 40
"""Ends without the plain one. About one in four aborts: the thread is not always in torch."""


def end(kind: str) -> subprocess.CompletedProcess[str]:
    run = subprocess.run([sys.executable, "-c", RANK, kind], capture_output=True, text=True)
    assert run.stdout == "the handlers have run\n"
    return run


@pytest.mark.slow
def test_a_thread_in_torch_does_not_abort_the_plain_end() -> None:
    run = end("plain")
    assert run.returncode == 85, run.stderr


@pytest.mark.long
def test_a_thread_in_torch_aborts_the_usual_end() -> None:
    """Python unwinds the thread, and C++ aborts the process."""
    runs = (end("usual") for _ in range(TRIES))
    aborted = next((run for run in runs if run.returncode != 85), None)
    assert aborted is not None and aborted.returncode == -6
    assert "terminate called without an active exception" in aborted.stderr
