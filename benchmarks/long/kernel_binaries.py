"""Resources of the kernels' binaries, compiled for GPUs that this machine need not have.

Every program of tests/support/kernels, with every option, is compiled for a large model's width.
The line of a binary has its registers per thread (at most 255), the bytes of local memory that a
thread spills to (memory traffic that the algorithm does not need), its shared memory, and the
number of instructions that use the matrix units.

    python -m benchmarks.long.kernel_binaries [--types bfloat16 float32 float16] [--cards 90 80 100]
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
from support.kernels.binaries import LONG, compiled, every_launch

from headrace.models.attestation.cases import all_cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="*", default=["bfloat16"])
    parser.add_argument("--cards", nargs="*", type=int, default=[90, 80, 100])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"triton {triton.__version__}; compiled, not run: no device is needed")
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
