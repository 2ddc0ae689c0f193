"""What Triton needs on a machine: an assembler to compile, a C compiler for its launcher."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

from . import cache

LAUNCHER = "*/cuda_utils*.so"
"""Triton's launcher in its cache: C that it compiles once for each machine."""


def find_tool_problem() -> str | None:
    """Return why the fused kernels cannot be compiled for this machine's GPUs, or None; also None
    if none of its GPUs can run them."""
    import torch

    from ..kernels.choice import find_device_problem

    problems: list[str | None] = []
    for number in range(torch.cuda.device_count()):
        if find_device_problem(torch.device("cuda", number)) is None:
            major, minor = torch.cuda.get_device_capability(number)
            problems += [find_assembler_problem(10 * major + minor), find_launcher_problem()]
    return next((problem for problem in problems if problem is not None), None)


def find_assembler_problem(arch: int) -> str | None:
    """Return why no program can be compiled for this capability, or None."""
    from triton import knobs

    name = "ptxas" if arch < 100 else "ptxas_blackwell"
    tool = getattr(knobs.nvidia, name, None) or knobs.nvidia.ptxas
    try:
        path = Path(tool.path)
    except Exception as error:  # Triton raises a RuntimeError, whatever it has looked for
        path, reason = None, f": {str(error).splitlines()[0]}"
    else:
        reason = f": {path} is missing"
    if path is not None and path.is_file() and os.access(path, os.X_OK):
        return None
    return (
        f"Triton has no assembler (ptxas) for sm_{arch}{reason}; pip install --force-reinstall "
        f"triton, or set {'TRITON_PTXAS_PATH' if arch < 100 else 'TRITON_PTXAS_BLACKWELL_PATH'} "
        "to that of a CUDA toolkit"
    )


def find_launcher_problem() -> str | None:
    """Return why Triton cannot compile its launcher, or None. It is compiled once, and kept."""
    if any(cache.folder().glob(LAUNCHER)):
        return None
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or shutil.which(compiler.split()[0]) is None:
        named = f"{compiler} (of the variable CC)" if compiler else "gcc or clang"
        return (
            f"Triton needs a C compiler for its launcher, and finds no {named}; apt-get install gcc"
        )
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        return (
            "Triton needs the headers of Python for its launcher, and finds no Python.h; apt-get "
            "install python3-dev"
        )
    return None
