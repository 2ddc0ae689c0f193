"""Process of one task of gpu_suite: `_gpu_task.py [--dry] TASK [ARGUMENT …]`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton decides at import
    if options.task in ("ncu", "sanitizer"):
        from benchmarks.long import _gpu_tools

        return int(getattr(_gpu_tools, options.task)(*options.arguments, options.dry))
    if options.dry:
        from support.kernels.bf16_interpreter import correct_bf16

        correct_bf16()
    from benchmarks.long import _gpu_products, _gpu_smoke

    if options.task == "weights":
        from benchmarks.long._gpu_lines import Sizes
        from benchmarks.long._gpu_run import draw_weights

        model, folder = options.arguments
        draw_weights(model, Sizes(options.dry), Path(folder))
        return 0
    tasks = {
        "rates": _gpu_smoke.rates,
        "smoke": _gpu_smoke.smoke,
        "attention": _gpu_products.attention,
        "fp8": _gpu_products.fp8,
    }
    return tasks[options.task](options.dry)


if __name__ == "__main__":
    # headrace, if it is not installed, the cases of the kernels, and the benchmarks
    sys.path[:0] = [str(ROOT / ".root"), str(ROOT / "tests"), str(ROOT)]
    sys.exit(main())
