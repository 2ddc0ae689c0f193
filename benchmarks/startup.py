"""How long a command takes to answer `--help`, beside the bare interpreter and the limit.

python -m benchmarks.startup
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from statistics import median

LIMIT = 0.5
RUNS = 15
COMMANDS = ("trainer", "tokenize", "mixtures", "headrace")


def seconds(words: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(words, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> None:
    folder = Path(sys.executable).parent
    words = {name: [str(folder / name), "--help"] for name in COMMANDS}
    words["python"] = [sys.executable, "-c", "pass"]
    for command in words.values():
        seconds(command)  # the disk's cache is warm from here on
    taken: dict[str, list[float]] = {name: [] for name in words}
    for _ in range(RUNS):
        for name, command in words.items():
            taken[name].append(seconds(command))
    bare = median(taken.pop("python"))
    for name, times in taken.items():
        middle = median(times)
        print(
            f"{name} --help: {middle:.3f} s, {middle / LIMIT:.2f} of the limit of {LIMIT} s, "
            f"{middle / bare:.1f} times `python -c pass` ({bare:.3f} s)"
        )


if __name__ == "__main__":
    main()
