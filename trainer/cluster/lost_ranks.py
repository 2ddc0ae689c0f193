"""The error of a rank whose collective failed because another rank, or its machine, was lost."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from ...console.errors import RunError

LOST = re.compile(
    r"gloo.*(Connection (closed|reset) by peer|Connection timed out|Broken pipe|No route to host)"
    r"|remote process exited",
    re.DOTALL,
)
"""Messages of gloo and of NCCL."""
ADDRESS = re.compile(r"\[(\d+(?:\.\d+){3}|[0-9a-f:]+)\]:\d+")


class LostRankError(RunError):
    """Another rank, or its machine, was lost."""


@contextlib.contextmanager
def naming_lost_ranks(name: str) -> Iterator[None]:
    """Raise a LostRankError of the rank `name` for a connection to another rank that was lost: no
    launcher that watches all ranks says which one ended first."""
    try:
        yield
    except RuntimeError as error:  # torch's DistError and DistBackendError too
        text = str(error)
        if LOST.search(text) is None:
            raise
        at = ADDRESS.search(text)
        raise LostRankError(
            f"{name} lost its connection to another rank{f' at {at[1]}' if at else ''}: "
            "that rank has ended, or its machine or network failed",
            where=text.partition(". This is")[0].rpartition("gloo/")[2],
            hint="the log of that rank may say why it ended. The same command works on any number "
            "of ranks; a run resumes from its last checkpoint",
        ) from error
