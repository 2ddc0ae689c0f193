"""Resources of this machine."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Limits of a container: version 2 of control groups."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def memory(name: str) -> int:
    """Return a number of /proc/meminfo, such as `MemAvailable`, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(dict(line.split(":") for line in lines)[name].split()[0]) * 1024


def free_memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes of memory that this machine, or its container, can still give."""
    free = memory("MemAvailable") if sys.platform == "linux" else _physical_memory()
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(cached.get("inactive_file", 0)))
    return free


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
