"""The fused kernels on a GPU: first whether they are right, then how fast they are.

    python -m benchmarks.long.kernels --results FILE         all of it; needs a GPU, torch, triton
    python -m benchmarks.long.kernels --only checks          or limits, times, models
    python -m benchmarks.long.kernels --only times modal ssd
    python -m benchmarks.long.kernels --dry                  the script itself, small, on a CPU by
                                                             Triton's interpreter, unmeasured

checks   every kernel with every option of tests/kernel_cases, in bf16, fp16 and fp32, on fresh
         random inputs and poisoned outputs, against its twin in fp64
limits   what only a device can show: rows beyond the reach of 32 bits, strange strides, one token,
         no row, CUDA graphs, compiled graphs of changing shape, a second GPU if there is one
times    each beside its peers, and as a share of what the device can copy or multiply, measured in
         the same process
models   a step of a model of a billion parameters beside one of a Transformer of the same size

Each has a process of its own, so that one that fails takes no other along. Lines are written as
they come, and added to the file of --results: what was found stays, however it ends.
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
    parser.add_argument("names", nargs="*", help="of kernels, and lengths of rows for models")
    parser.add_argument("--only", choices=PARTS, action="append", help="one part, or several")
    parser.add_argument("--dry", action="store_true", help="try the script out on a CPU")
    parser.add_argument("--results", type=Path, help="a file to which lines are added")
    parser.add_argument("--patience", type=int, default=540, help="seconds that one process gets")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        from _kernel_measures import measured

        name, dtype = options.names
        return measured(options.only[0], name, dtype, options.dry)
    import torch

    if not options.dry and not torch.cuda.is_available():
        print("there is no GPU here: nothing was checked and nothing measured", file=sys.stderr)
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
    # Checks leave a GPU time, and programs are compiled by the CPU.
    workers = max(1, min(8, (os.cpu_count() or 1) // 2))

    def run(task: Task) -> bool:
        return child(*task, options.dry, options.patience, report)

    with ThreadPoolExecutor(workers) as pool:
        done = dict(zip(checks, pool.map(run, checks), strict=True))
    done |= {task: run(task) for task in others}
    failed = [" ".join(task) for task, right in done.items() if not right]
    report(f"failed: {', '.join(failed)}" if failed else f"all {len(done)} are right")
    return 1 if failed else 0


Task = tuple[str, str, str]
"""A part, the name of a kernel or a length, and the type of the numbers."""


def tasks(parts: list[str], names: list[str], dry: bool) -> list[Task]:
    """What each process is to do."""
    from _kernel_measures import BOUNDS, LENGTHS

    from headrace.models.kernels import KERNELS

    lengths = [str(length) for length in LENGTHS[dry]]
    unknown = [name for name in names if name not in (*KERNELS, *lengths)]
    if unknown:
        known = ", ".join((*KERNELS, *lengths))
        raise ValueError(f"there is no {', '.join(unknown)}; there are {known}")
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
    """Lines, as they come."""

    def __init__(self, file: Path | None) -> None:
        self.file = file

    def __call__(self, line: str) -> None:
        print(f"{line}\n", end="", flush=True)  # in one piece: checks report several at a time
        if self.file is not None:
            with self.file.open("a") as file:
                file.write(line + "\n")


def circumstances(dry: bool) -> list[str]:
    import torch
    import triton

    where = "a CPU, by the interpreter" if dry else torch.cuda.get_device_name()
    return [
        f"date:     {datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        f"device:   {where}",
        f"versions: python {platform.python_version()}, torch {torch.__version__},"
        f" triton {triton.__version__}",
        f"command:  python -m benchmarks.long.kernels {shlex.join(sys.argv[1:])}".rstrip(),
        "",
    ]


def child(part: str, name: str, dtype: str, dry: bool, patience: int, report: Report) -> bool:
    """Whether a process of its own came through with it."""
    command = [sys.executable, __file__, "--here", "--only", part, name, dtype, *(["--dry"] * dry)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if dry:
        environment["TRITON_INTERPRET"] = "1"
    with subprocess.Popen(
        ["timeout", str(patience), *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,  # what a process ends with belongs to what it found
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
