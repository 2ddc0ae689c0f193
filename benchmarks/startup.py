"""Time of `--help` for each command, compared with the bare interpreter and with a limit.

python -m benchmarks.startup
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median

LIMIT = 0.5
RUNS = 15
COMMANDS = ("trainer", "tokenize", "mixtures", "headrace")


def seconds(words: list[str]) -> tuple[float, float]:
    """Return wall time and CPU time."""
    before, start = getrusage(RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    taken, after = time.perf_counter() - start, getrusage(RUSAGE_CHILDREN)
    return taken, after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    folder = Path(sys.executable).parent
    words = {name: [str(folder / name), "--help"] for name in COMMANDS}
    words["python"] = [sys.executable, "-c", "pass"]
    for command in words.values():
        seconds(command)  # fills the page cache
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in words}
    for _ in range(RUNS):
        for name, command in words.items():
            taken[name].append(seconds(command))
    middle = {
        name: [median(column) for column in zip(*rows, strict=True)] for name, rows in taken.items()
    }
    bare, bare_cpu = middle.pop("python")
    for name, (clock, cpu) in middle.items():
        print(
            f"{name} --help: {clock:.3f} s, {clock / LIMIT:.2f} of the limit of {LIMIT} s "
            f"({cpu:.3f} s of CPU); {clock / bare:.1f} times `python -c pass`, {bare:.3f} s "
            f"({bare_cpu:.3f} s of CPU)"
        )


if __name__ == "__main__":
    main()
