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
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Limits of a container: version 2 of control groups."""
GPU_FILES = ("nvidia*", "nvhost*", "nvmap", "dxg", "kfd")
"""Files of /dev: of NVIDIA's driver, on its boards, under Windows; of AMD's driver."""
HIDING = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
PROBE = "#include <Python.h>\n#include <cmath>\nint probe(double x) { return std::isnan(x); }\n"
"""Program with the headers of the code that torch.compile generates."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def process_start() -> float:
    """Return when this process began, on the clock of `time.monotonic`: before its first import."""
    if sys.platform != "linux":
        return time.monotonic()
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


def gpus_seen() -> tuple[str, ...]:
    """Return the device files of GPUs, and the variables that hide some: what torch finds depends
    on them. A machine with Linux and without such files has no GPU, which is known without torch.
    """
    if sys.platform != "linux":
        return (sys.platform,)
    files = sorted(str(file) for pattern in GPU_FILES for file in Path("/dev").glob(pattern))
    hidden = [f"{name}={os.environ[name]}" for name in HIDING if name in os.environ]
    return (*files, *hidden) if files else ()


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


def cpp_compiler() -> str:
    """Return the C++ compiler that torch.compile takes on this machine: a name or a path."""
    return os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")


def cpp_problem() -> str | None:
    """Return why torch.compile cannot generate code for the CPU of this machine, or None. It
    compiles a small program."""
    compiler = cpp_compiler()
    words = shlex.split(compiler)
    if not words or shutil.which(words[0]) is None:
        return f"the C++ compiler `{compiler}` is not installed"
    include = f"-I{sysconfig.get_path('include')}"
    threads = ["-fopenmp"] if sys.platform == "linux" else []
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "probe.so"
        command = [*words, "-x", "c++", "-", "-shared", "-fPIC", *threads, include]
        found = subprocess.run([*command, "-o", made], input=PROBE, capture_output=True, text=True)
        if found.returncode == 0 and made.exists():
            return None
    said = next((line for line in found.stderr.splitlines() if "error" in line), "")
    return f"the C++ compiler `{compiler}` fails" + (f": {said.strip()}" if said else "")
