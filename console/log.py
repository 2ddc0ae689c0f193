"""Logging to stderr, in one format.

Libraries call `get_logger(__name__)`; only commands call `setup`.
"""

from __future__ import annotations

import copy
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


def can_colour(stream: TextIO) -> bool:
    """True for a terminal, unless the user has set NO_COLOR (no-color.org)."""
    return can_rewrite_lines(stream) and not os.environ.get("NO_COLOR")


class _ColouredLevels(logging.Formatter):
    """Shows warning levels in yellow, and error levels in red."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.levelno >= logging.WARNING:
            number = 31 if record.levelno >= logging.ERROR else 33
            record = copy.copy(record)  # other handlers receive the same record
            record.levelname = f"\x1b[{number}m{record.levelname}\x1b[0m"
        return super().formatMessage(record)


def get_logger(name: str) -> logging.Logger:
    return logging.getLogger(name)


def setup(*, debug: bool = False) -> None:
    """Log headrace at INFO (DEBUG with `debug`) and other libraries at WARNING, to stderr."""
    rank = os.environ.get("RANK")
    form = FORMAT if rank is None else FORMAT.replace("%(message)s", f"[rank {rank}] %(message)s")
    if can_rewrite_lines(sys.stderr):  # the current line may be a progress line
        form = CLEAR_LINE + form
    handler = logging.StreamHandler()
    formatter = _ColouredLevels if can_colour(sys.stderr) else logging.Formatter
    handler.setFormatter(formatter(form, datefmt="%H:%M:%S"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger("headrace").setLevel(logging.DEBUG if debug else logging.INFO)
