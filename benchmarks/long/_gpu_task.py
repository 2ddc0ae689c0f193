"""Process of one task of gpu_suite.py: `_gpu_task.py [--dry] TASK [ARGUMENT …]`."""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).parents[2]

PREDICTION = "prediction of "
"""Begins the name of a prediction's line."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task")
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--dry", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    if options.task == "predictions":
        return predictions(options.arguments, options.dry)
    if options.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # Triton decides at import
    if options.task in ("ncu", "sanitizer"):
        from benchmarks.long import _gpu_tools

        return int(getattr(_gpu_tools, options.task)(*options.arguments, options.dry))
    if options.dry:
        from support.kernels.bf16_interpreter import correct_bf16

        correct_bf16()
    from benchmarks.long import _gpu_products, _gpu_smoke

    tasks = {
        "rates": _gpu_smoke.rates,
        "smoke": _gpu_smoke.smoke,
        "attention": _gpu_products.attention,
        "fp8": _gpu_products.fp8,
    }
    return tasks[options.task](options.dry)


def predictions(names: list[str], dry: bool) -> int:
    """Print the predictions of these lines."""
    from benchmarks.long._gpu_lines import Sizes, lines
    from benchmarks.long._gpu_predictions import predict

    by_name = {f"{PREDICTION}{line.name}": line for line in lines()}
    for name in names:
        try:
            text = predict(by_name[name], Sizes(dry))
        except Exception as error:  # the measurement does not depend on it
            text = f"failed: {type(error).__name__}: {' '.join(str(error).split())}"[:300]
        print(f"{name}: {text}", flush=True)
    return 0


if __name__ == "__main__":
    # headrace, if it is not installed, the cases of the kernels, and the benchmarks
    sys.path[:0] = [str(ROOT / ".root"), str(ROOT / "tests"), str(ROOT)]
    sys.exit(main())
