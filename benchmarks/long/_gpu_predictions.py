"""Predictions for lines of gpu_step.py: those of `trainer plan` for one GPU.

The planner prices rows of one document; kernels without a measured rate count by their bytes and
operations (`--roofline`). It needs headrace's requirements, unlike the measurements.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ._gpu_lines import Line, Sizes

HARDWARE = ("h100", "h200")
PREDICTION = "prediction of "
"""Begins the name of a prediction's line."""
COMMAND = (
    *(sys.executable, "-m", "headrace.trainer.cli", "plan", "--json"),
    *("--gpus", "1", "--roofline"),
)


def prediction_name(line: Line, hardware: str) -> str:
    return f"{PREDICTION}{line.name} on an {hardware.upper()}"


def predict(line: Line, hardware: str) -> str:
    """Return the planner's seconds, rate and memory for a line, or its error."""
    tokens = Sizes(dry=False).tokens
    sizes = ("--seq-len", str(tokens), "--batch-tokens", str(tokens))
    root = str(Path(__file__).parents[2] / ".root")  # headrace, if it is not installed
    planned = subprocess.run(
        [*COMMAND, "--model", line.model, *sizes, "--hardware", hardware],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
    )
    if planned.returncode:
        return f"failed: {' '.join(planned.stderr.split())[-300:]}"
    plan = json.loads(planned.stdout)["plan"]
    seconds, memory = plan["predicted"]["seconds"], plan["predicted"]["memory"]
    recomputed = " and ".join(sorted({str(layer["recompute"]) for layer in plan["layers"]}))
    return (
        f"{tokens / seconds:,.0f} tokens/s, {1e3 * seconds:.1f} ms a step, memory "
        f"{memory / 2**30:.1f} GiB, {plan['engine']['kind']}, recompute {recomputed}"
    )
