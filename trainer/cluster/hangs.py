"""Find the ranks that keep a hanging run waiting.

A rank that waits for its peers is in a collective, in the wait for one, or, on a GPU, in the wait
for the device. The innermost Python line in its stack says so.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Mapping

WAITS = re.compile(
    r"torch/distributed/|torch/cuda/streams\.py|deepspeed/comm/|models/parallel/collectives\.py"
    r"|trainer/(loop/(compute_time|execute)|cluster/(ranks|rendezvous))\.py"
)
"""Files whose functions wait for ranks: in torch and DeepSpeed, and in headrace where it calls
torch functions that are not written in Python."""
INNERMOST = re.compile(r'File "(?P<file>.+)", line \d+ in ')


def awaited_ranks(stacks: Mapping[int, str]) -> list[int]:
    """Return the ranks that wait for no rank, while their peers do. `stacks` are faulthandler's, by
    rank. Return none if no rank waits, or if all do."""
    files = {
        rank: match["file"] for rank, stack in stacks.items() if (match := INNERMOST.search(stack))
    }
    busy = [rank for rank, file in files.items() if WAITS.search(file) is None]
    return busy if len(busy) < len(files) else []


def is_waiting() -> bool:
    """Return whether this process's main thread waits for ranks."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return WAITS.search(frame.f_code.co_filename) is not None
