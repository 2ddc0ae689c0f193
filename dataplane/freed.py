"""Trims the heap. glibc keeps freed pages: after arrays of many sizes, several times what is in
use."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def trim_heap() -> None:
    """Return freed memory to the system, on glibc."""
    if trim := _malloc_trim():
        trim(0)


@cache
def _malloc_trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
