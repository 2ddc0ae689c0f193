"""Run benchmarks, and save their output.

    python -m benchmarks                        all quick benchmarks: the files of this folder
    python -m benchmarks startup long.kernels   benchmarks by name; long ones are in long/

A benchmark is a script that compares headrace with a peer or a limit in one run, and prints one
line with a ratio for each comparison. results/NAME.txt holds the lines of the last run, with the
date, the machine, the versions and the command.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PACKAGES = (
    "headrace",
    "torch",
    "deepspeed",
    "mosaicml-streaming",
    "tokenizers",
    "pyarrow",
    "numpy",
)


def main(names: list[str]) -> int:
    quick = sorted(file.stem for file in HERE.glob("[!_]*.py"))
    failed = [name for name in names or quick if not measure(name)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def measure(name: str) -> bool:
    command = ["-m", f"benchmarks.{name}"]
    print(f"# {name}", flush=True)
    process = subprocess.Popen(
        [sys.executable, *command], cwd=HERE.parent, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    if process.wait() != 0 or not lines:
        return False
    file = HERE / "results" / f"{name}.txt"
    file.parent.mkdir(exist_ok=True)
    file.write_text("\n".join(circumstances(command)) + "\n\n" + "".join(lines))
    return True


def circumstances(command: list[str]) -> list[str]:
    date = datetime.datetime.now(datetime.UTC)
    return [
        f"date:     {date:%Y-%m-%d %H:%M} UTC",
        f"machine:  {machine()}",
        f"versions: python {platform.python_version()}, {versions()}",
        f"command:  python {' '.join(command)}",
    ]


def machine() -> str:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    model = platform.processor() or platform.machine()
    memory = ""
    if sys.platform == "linux":
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
        memory = f", {os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB"
    return f"{model}, {cores} cores{memory}, {platform.system()}"


def versions() -> str:
    """Return the versions of the installed packages: some benchmarks need torch alone."""
    known = {package.name: package.version for package in importlib.metadata.distributions()}
    return ", ".join(f"{name} {known[name]}" for name in PACKAGES if name in known)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
