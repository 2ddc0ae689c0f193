"""Memory that was freed, given back to the system.

The C library keeps the pages of freed arrays for later ones: after arrays of many sizes, several
times what is in use.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back() -> None:
    """Give freed memory back to the system, where the C library can (glibc)."""
    if trim := _malloc_trim():
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
