"""Plans of models that were traced before: CPU time and memory of the whole command, beside those
of `import torch`, which the command does without.

    python -m benchmarks.planner_start
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import NamedTuple

RUNS = 5
ROWS = "--seq-len 4096 --batch-tokens 4Mi --hardware h100 --roofline"
PLANS = (("llama2-7b", 64), ("zamba2-7b", 64), ("llama2-70b", 256))
"""Model and GPUs."""


class Taken(NamedTuple):
    """CPU seconds and most resident bytes of a process."""

    seconds: float
    bytes: float


def taken_by(words: list[str]) -> Taken:
    quiet = subprocess.DEVNULL
    with subprocess.Popen(words, stdout=quiet, stderr=quiet) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, words
    return Taken(usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024)


def main() -> None:
    trainer = str(Path(sys.executable).parent / "trainer")
    commands = {
        f"{model} on {gpus} GPUs": f"{trainer} plan --model {model} --gpus {gpus} {ROWS}".split()
        for model, gpus in PLANS
    }
    commands["torch"] = [sys.executable, "-c", "import torch"]
    first = {name: taken_by(words) for name, words in commands.items()}  # traces
    result: dict[str, list[Taken]] = {name: [] for name in commands}
    for _ in range(RUNS):  # the commands take turns
        for name, words in commands.items():
            result[name].append(taken_by(words))
    middle = {
        name: Taken(*(median(column) for column in zip(*rows, strict=True)))
        for name, rows in result.items()
    }
    torch = middle.pop("torch")
    for name, (seconds, size) in middle.items():
        print(
            f"plan of {name}: {seconds:.2f} CPU s and {size / 2**20:.0f} MiB, "
            f"{seconds / torch.seconds:.2f} and {size / torch.bytes:.2f} of `import torch` "
            f"({torch.seconds:.2f} CPU s, {torch.bytes / 2**20:.0f} MiB); "
            f"with its trace {first[name].seconds:.2f} CPU s"
        )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        main()
