"""Files mapped into memory without a descriptor of their own.

A map of Python's `mmap` holds a duplicate of the file's descriptor, and the usual limit is 1,024
for a process. Here a file is mapped over anonymous memory, which holds none.
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


def address_space(size: int) -> Bytes:
    """Return memory into which files can be mapped. Views of the array keep the memory, and the
    maps in it, until the last of them is gone."""
    if not size:
        return NOTHING
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return np.frombuffer(mmap.mmap(-1, size, flags=flags, prot=mmap.PROT_READ), np.uint8)


FileState = tuple[int, int, int, int]
"""Size, inode, mtime and ctime in nanoseconds of a file."""


def state_of(path: str) -> FileState:
    """Return what changes with a file. Only the kernel sets ctime: a program that writes to the
    file can set its mtime back."""
    status = os.stat(path)  # noqa: PTH116 (a Path of each mapped file takes 2 KB)
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns


def map_over(memory: Bytes, descriptor: int, *, populate: bool = False) -> None:
    """Map the beginning of an open file over memory of `address_space`, for reading."""
    address, size = memory.ctypes.data, len(memory)
    flags = mmap.MAP_SHARED | MAP_FIXED | (mmap.MAP_POPULATE if populate else 0)
    if _mmap()(address, size, mmap.PROT_READ, flags, descriptor, 0) == FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def map_file(path: str | os.PathLike[str]) -> Bytes:
    """Map a whole file for reading."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        memory = address_space(os.fstat(descriptor).st_size)
        if len(memory):
            map_over(memory, descriptor)
        return memory
    finally:
        os.close(descriptor)


@cache
def _mmap() -> Any:
    """The C function: Python's own cannot place a map."""
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.restype = ctypes.c_void_p
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    return function
