"""Predictions for lines of gpu_step.py: those of `trainer plan` for one GPU.

The planner prices rows of one document; kernels without a measured rate count by their bytes and
operations (`--roofline`). It needs headrace's requirements, unlike the measurements.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from ._gpu_lines import Line, Sizes

COMMAND = (
    *(sys.executable, "-m", "headrace.trainer.cli", "plan", "--json"),
    *("--gpus", "1", "--roofline"),
)


def predict(line: Line, hardware: str = "h100") -> dict[str, Any]:
    """Return the planner's tokens/s, memory and recompute for a line, or its error."""
    from headrace.console.config import dump

    root = str(Path(__file__).parents[2] / ".root")  # headrace, if it is not installed
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model.yaml"
        model.write_text(dump(Sizes(dry=False).model(line.model)))
        tokens = line.rows * line.tokens
        sizes = ("--seq-len", str(line.tokens), "--batch-tokens", str(tokens))
        path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
        planned = subprocess.run(
            [*COMMAND, "--model", str(model), *sizes, "--hardware", hardware],
            env={**os.environ, "PYTHONPATH": path},
            capture_output=True,
            text=True,
        )
    if planned.returncode:
        return {"failed": " ".join(planned.stderr.split())[-300:]}
    plan = json.loads(planned.stdout)["plan"]
    seconds, memory = plan["predicted"]["seconds"], plan["predicted"]["memory"]
    return {
        "tokens_per_second": tokens / seconds,
        "seconds": seconds,
        "memory": memory,
        "engine": plan["engine"]["kind"],
        "recompute": sorted({str(layer["recompute"]) for layer in plan["layers"]}),
    }
