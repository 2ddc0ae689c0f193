"""Checks and times of the fused kernels on a GPU.

    python -m benchmarks.long.kernels --results FILE         all parts; needs a GPU, torch, triton
    python -m benchmarks.long.kernels --only checks          or limits, times, models
    python -m benchmarks.long.kernels --only times modal ssd
    python -m benchmarks.long.kernels --dry                  test this script at small sizes on a
                                                             CPU, in Triton's interpreter

checks   every kernel with every option of tests/kernel_cases, in bf16, fp16 and fp32, on fresh
         random inputs and poisoned outputs, against its twin in fp64
limits   conditions that only a device can test: more than 2³¹ elements, unusual strides, one token,
         no rows, CUDA graphs, compiled graphs of changing shape, a second GPU if there is one
times    each kernel compared with its peers, and with the rate of a copy or a matrix product that
         the same process measures
models   a step of a hybrid of 1B parameters, compared with a Transformer of the same size

Each task runs in its own process, so that a failure does not affect the others. Lines are printed
at once and appended to the file of --results, so that an interrupted run keeps its results.
"""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / ".root"), str(ROOT / "tests"), str(ROOT)]  # headrace, if not installed

PARTS = ("checks", "limits", "times", "models")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="kernels, and lengths of rows for models")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--dry", action="store_true", help="test the script on a CPU")
    parser.add_argument("--results", type=Path, help="file to append lines to")
    parser.add_argument(
        "--patience", type=int, default=540, help="time limit of one process in seconds"
    )
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        from _kernel_measures import measured

        name, dtype = options.names
        return measured(options.only[0], name, dtype, options.dry)
    import torch

    if not options.dry and not torch.cuda.is_available():
        print("no GPU found: nothing was checked or measured (try --dry)", file=sys.stderr)
        return 1
    try:
        work = list(tasks(options.only or list(PARTS), options.names, options.dry))
    except ValueError as error:
        parser.error(str(error))
    report = Report(options.results)
    for line in circumstances(options.dry):
        report(line)
    checks = [task for task in work if task[0] == "checks"]
    others = [task for task in work if task[0] != "checks"]
    # Checks mostly compile on the CPU and leave the GPU idle: run several at once.
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))

    def run(task: Task) -> bool:
        return child(*task, options.dry, options.patience, report)

    with ThreadPoolExecutor(workers) as pool:
        done = dict(zip(checks, pool.map(run, checks), strict=True))
    done |= {task: run(task) for task in others}
    failed = [" ".join(task) for task, passed in done.items() if not passed]
    report(f"failed: {', '.join(failed)}" if failed else f"all {len(done)} passed")
    return 1 if failed else 0


Task = tuple[str, str, str]
"""Part, name of a kernel or length of a row, and dtype."""


def tasks(parts: list[str], names: list[str], dry: bool) -> list[Task]:
    """Return the task of each process."""
    from _kernel_measures import BOUNDS, LENGTHS

    from headrace.models.kernels import KERNELS

    lengths = [str(length) for length in LENGTHS[dry]]
    unknown = [name for name in names if name not in (*KERNELS, *lengths)]
    if unknown:
        known = ", ".join((*KERNELS, *lengths))
        raise ValueError(f"unknown: {', '.join(unknown)}; choose from {known}")
    every = {"checks": KERNELS, "limits": KERNELS, "times": KERNELS, "models": lengths}
    usual = ["float32" if dry else "bfloat16"]
    return [
        (part, name, dtype)
        for part in PARTS
        if part in parts
        for name in every[part]
        if not names or name in names
        for dtype in (BOUNDS if part == "checks" and not dry else usual)
    ]


class Report:
    """Print lines at once, and append them to a file."""

    def __init__(self, file: Path | None) -> None:
        self.file = file

    def __call__(self, line: str) -> None:
        print(f"{line}\n", end="", flush=True)  # one write: checks report in parallel
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(line + "\n")


def circumstances(dry: bool) -> list[str]:
    import torch
    import triton

    where = "CPU, Triton's interpreter" if dry else torch.cuda.get_device_name()
    return [
        f"date:     {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"device:   {where}",
        f"versions: python {platform.python_version()}, torch {torch.__version__},"
        f" triton {triton.__version__}",
        f"command:  python -m benchmarks.long.kernels {shlex.join(sys.argv[1:])}".rstrip(),
        "",
    ]


def child(part: str, name: str, dtype: str, dry: bool, patience: int, report: Report) -> bool:
    """Run a task in its own process; return True if it succeeds."""
    command = [sys.executable, __file__, "--here", "--only", part, name, dtype, *(["--dry"] * dry)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    with subprocess.Popen(
        ["timeout", str(patience), *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # a traceback belongs to the report
        text=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            report(line.rstrip())
    if process.returncode == 124:
        report(f"{part} {name} {dtype}: stopped after {patience} s")
    return process.returncode == 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
