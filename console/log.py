"""Logging to stderr, in one format.

Libraries call `get_logger(__name__)`; only commands call `setup`.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TextIO

CLEAR_LINE = "\r\x1b[2K"
"""Escape sequence that clears the current line of a terminal."""

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def can_rewrite_lines(stream: TextIO) -> bool:
    """True for a terminal that can clear a line: not a file, a pipe or TERM=dumb."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def setup(*, debug: bool = False) -> None:
    """Log headrace at INFO (DEBUG with `debug`) and other libraries at WARNING, to stderr."""
    rank = os.environ.get("RANK")
    form = FORMAT if rank is None else FORMAT.replace("%(message)s", f"[rank {rank}] %(message)s")
    if can_rewrite_lines(sys.stderr):  # the current line may be a progress line
        form = CLEAR_LINE + form
    logging.basicConfig(format=form, datefmt="%H:%M:%S", level=logging.WARNING, force=True)
    logging.getLogger("headrace").setLevel(logging.DEBUG if debug else logging.INFO)
