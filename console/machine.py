"""Resources of this machine."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

PROBE = "#include <Python.h>\n#include <cmath>\nint probe(double x) { return std::isnan(x); }\n"
"""Program with the headers of the code that torch.compile generates."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


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
