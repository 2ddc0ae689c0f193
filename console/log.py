"""Logging: to stderr, one format, one place where it is set up.

Libraries call `get_logger(__name__)`; only a command calls `setup`.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

CLEAR_LINE = "\r\x1b[2K"
"""What a terminal needs before a line that replaces the one where the cursor stands."""

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def takes_back(stream: TextIO) -> bool:
    """Whether a line can be replaced: in no file or pipe, and on no terminal that is dumb."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def setup(*, debug: bool = False) -> None:
    """Send headrace's messages to stderr; other libraries speak only when something is wrong."""
    rank = os.environ.get("RANK")
    form = FORMAT if rank is None else FORMAT.replace("%(message)s", f"[rank {rank}] %(message)s")
    if takes_back(sys.stderr):  # a progress bar may stand there
        form = CLEAR_LINE + form
    logging.basicConfig(format=form, datefmt="%H:%M:%S", level=logging.WARNING, force=True)
    logging.getLogger("headrace").setLevel(logging.DEBUG if debug else logging.INFO)
