"""Tools of CUDA around a kernel of its own process: ncu and compute-sanitizer, where installed.

Neither changes a setting of the device: ncu leaves the clocks alone.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

KERNELS = Path(__file__).with_name("kernels.py")
SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "LaunchStats", "Occupancy")
METRICS = {
    "Duration": "duration",
    "DRAM Throughput": "of memory bandwidth",
    "L2 Cache Throughput": "of L2",
    "Compute (SM) Throughput": "of compute",
    "Registers Per Thread": "registers",
    "Achieved Occupancy": "occupancy",
    "Waves Per SM": "waves",
}
"""Metrics of a launch that a line has, by ncu's names."""
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Environment variables with settings of torch's allocator."""
LAUNCHES = 8
"""Launches of a backward pass to profile at most: a profiled launch runs many times."""


def child(part: str, kernel: str, dry: bool) -> list[str]:
    """Return the command of a kernel's own process (kernels.py)."""
    words = ["--here", part, kernel, "float32" if dry else "bfloat16", *(["--dry"] * dry)]
    return [sys.executable, str(KERNELS), *words]


def ncu(kernel: str, dry: bool) -> int:
    """Print a line for each launch of a kernel's backward pass at the size of a large model."""
    command = child("backward", kernel, dry)
    if dry:  # the same process, without the tool
        return subprocess.run(command).returncode
    if shutil.which("ncu") is None:
        print(f"ncu {kernel}: ncu is not installed", flush=True)
        return 0
    words = ["ncu", "--clock-control", "none", "--profile-from-start", "off", "--csv"]
    words += ["--page", "details", "--launch-count", str(LAUNCHES)]
    words += [word for section in SECTIONS for word in ("--section", section)]
    done = subprocess.run([*words, *command], stdout=subprocess.PIPE, text=True)
    result = list(launches(done.stdout.splitlines()))
    for line in result or done.stdout.splitlines()[-20:]:
        print(f"ncu {kernel}: {line}", flush=True)
    return done.returncode or (0 if result else 1)


def launches(output: Iterable[str]) -> Iterator[str]:
    """Yield a line for each launch in ncu's CSV."""
    rows = [line for line in output if line.startswith('"')]
    result: dict[str, list[str]] = {}
    for row in csv.DictReader(rows):
        launch = f"{row['ID']} {row['Kernel Name'].split('(')[0]}"
        if (label := METRICS.get(row.get("Metric Name") or "")) is not None:
            text = f"{row['Metric Value']} {row['Metric Unit']}".strip()
            result.setdefault(launch, []).append(f"{text} {label}")
    for launch, metrics in result.items():
        yield f"{launch}: {', '.join(dict.fromkeys(metrics))}"


def sanitizer(tool: str, kernel: str, dry: bool) -> int:
    """Run every option of a kernel at small sizes under a tool of compute-sanitizer."""
    command = child("small", kernel, dry)
    if dry:
        return subprocess.run(command).returncode
    if shutil.which("compute-sanitizer") is None:
        print(f"{tool} {kernel}: compute-sanitizer is not installed", flush=True)
        return 0
    words = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "5"]
    # Each tensor is an allocation of its own: an access past its end is seen.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for name in ALLOCATOR:  # with expandable segments the tool fails by itself
        environment.pop(name, None)
    return subprocess.run([*words, *command], env=environment).returncode
