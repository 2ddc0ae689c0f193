"""The stream in the loops of torchtitan and Megatron: stopped after 11 steps, and gone on with."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.data.small_data import plan_of

STEPS, STOP = 40, 11
ROOT = Path(__file__).resolve().parents[3]
TASKS = ROOT / "tests/support/tasks"
TORCHTITAN = (
    *("torchtitan==0.3.0", "spmd_types==0.2.3", "torch_checkpointing", "tyro"),
    *("docstring-parser", "typeguard"),
)
"""With the packages that it imports and we do not have."""
MEGATRON = ("megatron-core>=0.16",)

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture
def plan(dataset: Callable[..., str], tmp_path: Path) -> str:
    """A plan of 40 steps of 12 rows of 32 tokens."""
    sources = {"web": {"data": dataset("web"), "max_epochs": 3}, "code": {"data": dataset("code")}}
    phase = {"tokens": STEPS * 12 * 32, "seq_len": 32, "batch": 12 * 32}
    phases = {"main": {**phase, "weights": {"web": 0.7, "code": 0.3}}}
    file = tmp_path / "plan.json"
    plan_of({"seed": 2, "chunk": 192, "window": 8, "sources": sources, "phases": phases}).save(file)
    return str(file)


def install(folder: Path, *packages: str) -> dict[str, str]:
    """Install packages alone, and return the environment that finds them."""
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder]
    subprocess.run([*command, *packages], check=True)
    return {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def run(environment: dict[str, str], *words: object) -> None:
    command = [sys.executable, *map(str, words)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-5000:]


def test_torchtitan(plan: str, tmp_path: Path) -> None:
    """The loader of the page loads on another number of ranks, with other micro-batches."""
    packages = tmp_path / "packages"
    environment = install(packages, *TORCHTITAN)
    page = (ROOT / "docs/loader.md").read_text()
    (block,) = re.findall(r"```python\n((?:(?!```).)*class StreamLoader.*?)```", page, re.DOTALL)
    (packages / "stream_loader.py").write_text(block)

    def train(name: str, ranks: int, steps: int, micro_batch: int) -> list[dict[str, Any]]:
        folder = tmp_path / name
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks)
        loop = (TASKS / "torchtitan_loop.py", plan, folder, steps, micro_batch)
        run(environment, *torchrun, *loop)
        return [json.loads((folder / f"{ranks}-{r}.json").read_text()) for r in range(ranks)]

    (whole,) = train("whole", 1, STEPS, 12)
    (first,) = train("cut", 1, STOP, 4)
    second = train("cut", 2, STEPS, 3)
    rows = list(first["rows"])
    for step in range(STEPS - STOP):
        for rank in second:
            rows += rank["rows"][step * 6 : step * 6 + 6]
    assert rows == whole["rows"] and len(rows) == STEPS * 12
    assert [*first["losses"], *second[0]["losses"]] == pytest.approx(whole["losses"], abs=1e-5)


def test_megatron(plan: str, tmp_path: Path) -> None:
    """Its schedule takes other micro-batches, and its mask keeps documents apart."""
    environment = install(tmp_path / "packages", *MEGATRON)
    run(environment, TASKS / "megatron_loop.py", plan, tmp_path / "results.json")
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["whole"]) == STEPS
    assert results["resumed"] == pytest.approx(results["whole"], abs=1e-5)
    assert results["whole"][0] != pytest.approx(results["whole"][-1], abs=1e-3), "it has learned"
    assert results["documents"] > 12 and results["error"] < 1e-5
