"""The step loop with FSDP2 and synthetic rows needs torch and its own dependencies alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

import headrace

OF_TORCH = "torch torchgen functorch sympy mpmath networkx jinja2 markupsafe filelock fsspec"

SCRIPT = """
from datetime import timedelta
from headrace.models.config.config import ModelConfig
from headrace.models.accounting.count import build_meta
from headrace.models.model.model import initial_weights
from headrace.models.config.options import OPTIONS
from headrace.models.config.options.precision import PRECISIONS
from headrace.trainer.cluster import ranks as group
from headrace.trainer.checkpoints.store import RunState
from headrace.trainer.loop.synthetic import SyntheticConfig
from headrace.trainer.engines.engine import load_weights
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.layout.config import LayoutConfig
from headrace.trainer.layout.groups import create_groups
from headrace.trainer.loop.loop import Loop, LoopOptions
from headrace.trainer.engines.objective import Objective
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.record.steps import NullRecorder
from headrace.trainer.loop.synthetic import SyntheticLoader, SyntheticPlan

minute = timedelta(minutes=1)
group.initialise("gloo", minute)
parallel = create_groups(LayoutConfig(), "cpu", minute)
operators = {"a": OPTIONS["attention"](heads=2), "g": OPTIONS["glu"](hidden=32)}
config = ModelConfig(vocab_size=64, width=32, pattern="[a]*2", mlp="g", operators=operators)
objective = Objective(build_meta(config))
engine = Fsdp2Config().build(objective, AdamWConfig(), PRECISIONS["fp32"], parallel)
load_weights(engine, initial_weights(config, 1))
plan = SyntheticPlan(SyntheticConfig(steps=2, seq_len=32, batch_rows=4), 64, 1)
def steps(step, rows):
    return iter(SyntheticLoader(plan, rank=0, world=1, micro_batch=rows, start_step=step))
options = LoopOptions(micro_batch_tokens=64, seed=1)
loop = Loop(plan, steps, plan.lr_factor, engine, parallel, options, hooks=[NullRecorder()])
state = RunState(step=0, row=0, tokens=0, plan_hash=plan.hash, updates=0, ledger="", seed=1)
print(loop.run(state)[0].updates)
"""


def test_torch_alone_is_enough(tmp_path: Path) -> None:
    packages = Path(torch.__file__).parents[1]
    for name in [*OF_TORCH.split(), "typing_extensions.py", "setuptools"]:
        if (packages / name).exists():
            (tmp_path / name).symlink_to(packages / name)
    for metadata in packages.glob("torch-*.dist-info"):
        (tmp_path / metadata.name).symlink_to(metadata)
    (tmp_path / "headrace").symlink_to(Path(headrace.__file__).parent)
    done = subprocess.run(
        [sys.executable, "-S", "-c", SCRIPT],  # -S: no site-packages but these
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.stdout.strip() == "2", done.stderr
