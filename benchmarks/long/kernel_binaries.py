"""The kernels' programs as binaries for GPUs that are not at hand, and what they ask of one.

Every program of tests/kernel_cases, with every option, is compiled at the width of a large
model. A line for each binary has its registers for a thread (255 are the most there are), the
bytes of local memory that a thread spills to (memory traffic that the algorithm does not have),
its shared memory, and how many of its instructions are products on the matrix units.

    python -m benchmarks.long.kernel_binaries [--types bfloat16 float32 float16] [--cards 90 80]
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / ".root"))  # headrace, if it is not installed
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

import torch
import triton
from kernel_binaries import LONG, compiled, every_launch
from kernel_cases import all_cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="*", default=["bfloat16"])
    parser.add_argument("--cards", nargs="*", type=int, default=[90, 80])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"triton {triton.__version__}; no device: compiled, not run")
    counts: Counter[str] = Counter()
    for dtype in options.types:
        launches = every_launch(all_cases(), LONG, [getattr(torch, dtype)])
        for launch in launches:
            for card in options.cards:
                binary = compiled(launch, card)
                spills = f", {binary.spilled} bytes spilled" if binary.spilled else ""
                products = f", {binary.products} on matrix units" if binary.products else ""
                print(
                    f"{launch.name} sm_{card} {dtype}: {binary.registers} registers{spills},"
                    f" {binary.shared} bytes shared{products} [{launch.configuration}]",
                    flush=True,
                )
                counts["binaries"] += 1
                counts["spilling"] += bool(binary.spilled)
    share = counts["spilling"] / counts["binaries"]
    print(f"kernel_binaries: {share:.2f} of {counts['binaries']} binaries spill registers")
    return 0


if __name__ == "__main__":
    sys.exit(main())
