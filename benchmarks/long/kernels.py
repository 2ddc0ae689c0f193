"""Checks and times of the fused kernels on a GPU.

    python -m benchmarks.long.kernels --results FILE         all parts; needs a GPU, torch, triton
    python -m benchmarks.long.kernels --only checks          or limits, times, models
    python -m benchmarks.long.kernels --only times modal ssd
    python -m benchmarks.long.kernels --dry                  test this script at small sizes on a
                                                             CPU, in Triton's interpreter

checks   every kernel with every option of models/attestation/cases, in bf16, fp16 and fp32, twice
         on fresh random inputs and poisoned outputs, against its twin in fp64: as `headrace doctor
         --kernels`
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
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).parents[2]

if TYPE_CHECKING:
    from benchmarks.long._tasks import Task

PARTS = ("checks", "limits", "times", "models")
PATIENCE = 540.0
"""Seconds of one process."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="kernels, and lengths of rows for models")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--dry", action="store_true", help="test the script on a CPU")
    parser.add_argument("--results", type=Path, help="file to append lines to")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, help="time limit of one process in seconds"
    )
    parser.add_argument("--here", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        from benchmarks.long._kernel_measures import measured

        name, dtype = options.names
        return measured(options.here, name, dtype, options.dry)
    import torch

    from benchmarks.long import _tasks

    if not options.dry and not torch.cuda.is_available():
        print("no GPU found: nothing was checked or measured (try --dry)", file=sys.stderr)
        return 1
    try:
        work = tasks(options.only or PARTS, options.names, options.dry, options.patience)
    except ValueError as error:
        parser.error(str(error))
    _tasks.stop_with_tasks()
    report = _tasks.Report(options.results)
    for line in _tasks.circumstances(options.dry):
        report(line)
    _tasks.run_all(work, report)
    failed = _tasks.failed(work, report)
    report(f"failed: {', '.join(failed)}" if failed else f"all {len(work)} passed")
    return 1 if failed else 0


def tasks(
    parts: Sequence[str], names: Sequence[str], dry: bool, limit: float = PATIENCE
) -> list[Task]:
    """Return the task of each process."""
    from benchmarks.long._kernel_measures import LENGTHS
    from headrace.models.attestation.trials import BOUNDS
    from headrace.models.kernels import KERNELS

    lengths = [str(length) for length in LENGTHS[dry]]
    unknown = [name for name in names if name not in (*KERNELS, *lengths)]
    if unknown:
        known = ", ".join((*KERNELS, *lengths))
        raise ValueError(f"unknown: {', '.join(unknown)}; choose from {known}")
    every = {"checks": KERNELS, "limits": KERNELS, "times": KERNELS, "models": lengths}
    usual = ["float32" if dry else "bfloat16"]
    return [
        task_of(part, name, dtype, dry, limit)
        for part in PARTS
        if part in parts
        for name in every[part]
        if not names or name in names
        for dtype in (BOUNDS if part == "checks" and not dry else usual)
    ]


def task_of(part: str, name: str, dtype: str, dry: bool, limit: float) -> Task:
    from benchmarks.long._tasks import Task

    return Task(
        f"{part} {name} {dtype}",
        (__file__, "--here", part, name, dtype, *(["--dry"] * dry)),
        limit,
        environment={"TRITON_INTERPRET": "1"} if dry else {},
        concurrent=part == "checks",  # checks mostly compile on the CPU and leave the GPU idle
    )


if __name__ == "__main__":
    # headrace, if it is not installed, the cases of the kernels, and the benchmarks
    sys.path[:0] = [str(ROOT / ".root"), str(ROOT / "tests"), str(ROOT)]
    sys.exit(main())
