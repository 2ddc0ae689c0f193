"""Files mapped into memory without holding a descriptor.

Python's `mmap` keeps a duplicate of the file's descriptor, and a process usually has 1,024 at most.
Here a file is mapped over anonymous memory, which keeps none.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from functools import cache
from typing import Any

import numpy as np

from ..arrays import Bytes

MAP_FIXED = 0x10
FAILED = ctypes.c_void_p(-1).value
NOTHING = np.empty(0, np.uint8)


def reserve_memory(size: int) -> Bytes:
    """Return memory into which files can be mapped.

    The memory and its maps live as long as the array and its views.
    """
    if not size:
        return NOTHING
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ), np.uint8)


FileState = tuple[int, int, int, int]
"""A file's size, inode, and mtime and ctime in nanoseconds."""


def read_state(path: str) -> FileState:
    """Return the state by which a file's changes show.

    Only the kernel sets ctime: a program that writes to the file can set its mtime back.
    """
    status = os.stat(path)  # noqa: PTH116 (a Path takes 2 KB for each mapped file)
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def map_over(memory: Bytes, descriptor: int, *, populate: bool = False) -> None:
    """Map the beginning of an open file over memory from `reserve_memory`, for reading."""
    address, size = memory.ctypes.data, len(memory)
    flags = mmap.MAP_SHARED | MAP_FIXED | (mmap.MAP_POPULATE if populate else 0)
    if _mmap()(address, size, mmap.PROT_READ, flags, descriptor, 0) == FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def map_file(path: str | os.PathLike[str]) -> Bytes:
    """Map a whole file for reading."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        memory = reserve_memory(os.fstat(descriptor).st_size)
        if len(memory):
            map_over(memory, descriptor)
        return memory
    finally:
        os.close(descriptor)


@cache
def _mmap() -> Any:
    """Return the C function: Python's `mmap` cannot choose an address."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return function
