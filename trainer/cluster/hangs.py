"""Ranks of a run that hangs: which wait for others, and which the others wait for.

A rank that waits for others stands in a collective, in the wait for one, or, on a GPU, in the wait
for the device. The innermost line of Python code of its stack says so.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Mapping

WAITS = re.compile(
    r"torch/distributed/|torch/cuda/streams\.py|deepspeed/comm/|models/parallel/collectives\.py"
    r"|trainer/(loop/(own_time|execute)|cluster/(ranks|rendezvous))\.py"
)
"""Files whose functions wait for other ranks: those of torch and DeepSpeed, and ours that call them
where torch is not written in Python."""
INNERMOST = re.compile(r'File "(?P<file>.+)", line \d+ in ')


def awaited_ranks(stacks: Mapping[int, str]) -> list[int]:
    """Return the ranks that the others wait for, by faulthandler's stacks of all ranks: they wait
    for none themselves. Return none if no rank waits, or if all do."""
    files = {
        rank: match["file"] for rank, stack in stacks.items() if (match := INNERMOST.search(stack))
    }
    busy = [rank for rank, file in files.items() if WAITS.search(file) is None]
    return busy if len(busy) < len(files) else []


def waits_for_others() -> bool:
    """Return True if the main thread of this process waits for other ranks."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return WAITS.search(frame.f_code.co_filename) is not None
