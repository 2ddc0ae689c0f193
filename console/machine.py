"""Resources of this machine."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from functools import cache
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""A container's limits: control groups, version 2."""
GPU_FILES = ("nvidia*", "nvhost*", "nvmap", "dxg", "kfd")
"""Patterns in /dev: NVIDIA's driver, its boards, WSL on Windows; AMD's driver."""
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""Parameters of glibc's mallopt."""
KEPT_BLOCK_BYTES, KEPT_BYTES = 32 << 20, 256 << 20
"""Largest block that is kept when it is freed, and free bytes that are kept in all."""
PROBE = "#include <Python.h>\n#include <cmath>\nint probe(double x) { return std::isnan(x); }\n"
"""Program that includes the headers of torch.compile's generated code."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def process_start() -> float:
    """Return when this process began, in seconds of `time.monotonic`: before its first import."""
    if sys.platform != "linux":
        return time.monotonic()
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def gpus_seen() -> tuple[str, ...]:
    """Return GPU device files and the variables that hide GPUs: torch's devices depend on them.

    Linux without such files has no GPU, which is known without torch.
    """
    if sys.platform != "linux":
        return (sys.platform,)
    files = sorted(str(file) for pattern in GPU_FILES for file in Path("/dev").glob(pattern))
    hidden = [f"{name}={os.environ[name]}" for name in HIDING if name in os.environ]
    return (*files, *hidden) if files else ()


def memory(name: str) -> int:
    """Return an entry in /proc/meminfo, such as `MemAvailable`, in bytes."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(dict(line.split(":") for line in lines)[name].split()[0]) * 1024


def free_memory(cgroup: Path = CGROUP) -> int:
    """Return the bytes that this machine, or its container, can still allocate."""
    free = memory("MemAvailable") if sys.platform == "linux" else _physical_memory()
    with contextlib.suppress(OSError, ValueError):  # no container, or no limit
        limit, used = (int((cgroup / f"memory.{name}").read_text()) for name in ("max", "current"))
        cached = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        free = min(free, limit - used + int(cached.get("inactive_file", 0)))
    return free


def _physical_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpp_compiler() -> str:
    """Return the C++ compiler that torch.compile calls: a name or a path."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def cpp_problem() -> str | None:
    """Compile a small program; return why torch.compile cannot generate CPU code, or None."""
    compiler = cpp_compiler()
    words = shlex.split(compiler)
    if not words or shutil.which(words[0]) is None:
        return f"the C++ compiler `{compiler}` is not installed"
    include = f"-I{sysconfig.get_path('include')}"
    threads = ["-fopenmp"] if sys.platform == "linux" else []
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "probe.so"
        command = [*words, "-x", "c++", "-", "-shared", "-fPIC", *threads, include]
        command += ["-o", str(library)]
        process = subprocess.run(command, input=PROBE, capture_output=True, text=True)
        if process.returncode == 0 and library.exists():
            return None
    reason = next((line for line in process.stderr.splitlines() if "error" in line), "")
    return f"the C++ compiler `{compiler}` fails" + (f": {reason.strip()}" if reason else "")


@cache
def keep_freed_memory() -> None:
    """Let glibc keep freed memory for later allocations. By default it gives blocks above a few
    hundred kilobytes back to the kernel, which clears their pages anew for every batch: a tenth of
    a build's CPU time."""
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return
    mallopt(M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
