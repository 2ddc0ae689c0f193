"""The report of a run of a million steps, beside its limit of memory.

    python -m benchmarks.report [--steps 1000000]

The run has 20 curves. The peak is that of the whole command `trainer report`, with its children.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

PEAK_BYTES = 300e6


def report(run: Path) -> tuple[float, float]:
    """Write the report of a run; return the peak of its memory and the seconds of CPU."""
    command = [sys.executable, "-m", "headrace.trainer.cli", "report", str(run)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return 1024.0 * usage.ru_maxrss, usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    steps = parser.parse_args().steps
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        # Another process writes: Linux counts the memory of a parent as that of its children.
        writing = [sys.executable, "-m", "benchmarks._written_runs", str(run), str(steps)]
        subprocess.run(writing, check=True)
        peak, cpu = report(run)
        size, lines = ((run / name).stat().st_size for name in ("report.html", "metrics.jsonl"))
    name = f"report of {steps:,} steps"
    print(
        f"{name}: {peak / 1e6:.0f} MB at most, {peak / PEAK_BYTES:.2f} of the limit\n"
        f"{name}: {cpu:.1f} s of CPU, {lines / cpu / 1e6:.0f} MB of metrics.jsonl a second\n"
        f"{name}: the page has {size / 1e6:.2f} MB, {size / lines:.4f} of metrics.jsonl"
    )


if __name__ == "__main__":
    main()
