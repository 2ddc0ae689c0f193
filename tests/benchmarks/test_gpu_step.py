"""Lines of gpu_step: models, settings, weights; and a step with a wrong kernel."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import fields, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks import _synthetic_run
from benchmarks._gpu_models import MODELS, TINY, WIDE, hybrid, load_wide, with_kernels
from benchmarks.long import _gpu_run
from benchmarks.long._gpu_lines import Line, Sizes, lines, predictable
from headrace.models.config.config import ModelConfig, load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.model.model import initial_weights
from headrace.trainer.cluster import ranks
from headrace.trainer.launch import worker
from headrace.trainer.launch.options import StartOptions
from headrace.trainer.layout.devices import ALLOCATOR
from headrace.trainer.loop.hooks.hook import Hooks
from headrace.trainer.loop.loop import LoopOptions
from headrace.trainer.record.config import WatchConfig
from headrace.trainer.run.config import RunConfig
from headrace.trainer.run.job import Job
from headrace.trainer.run.process import build_loop_options

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_wrong_kernel_is_reported() -> None:
    """Negative control: an intact step passes, and the same step with a wrong gradient does not."""
    code = """
import sys
from unittest import mock
import torch
from support.kernels.bf16_interpreter import correct_bf16
correct_bf16()
from benchmarks.long import _gpu_smoke
from benchmarks.long._gpu_run import leave
from headrace.models.kernels import glu
_gpu_smoke.MODEL = "transformer-1b"
assert _gpu_smoke.smoke(True) == 0
right = glu.glu
def wrong(x, *options):
    y = right(x, *options)
    return y.detach() + 1.3 * (y - y.detach())  # the value, with a gradient that is 30% too large
with mock.patch.object(glu, "glu", wrong):
    assert _gpu_smoke.smoke(True) == 1
leave()
"""
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "WRONG gradient of blocks.0.mlp" in done.stdout


def test_models_are_the_shipped_ones() -> None:
    for name, config in MODELS.items():
        assert config == load_model_config(name)
    assert TINY.keys() == MODELS.keys()
    plain = with_kernels(MODELS["hybrid-1b"], "torch")
    assert plain.kernel == "torch" and {
        operator.kernel for operator in plain.operators.values()
    } == {  # type: ignore[attr-defined]
        "torch"
    }


def test_lines_cover_each_setting() -> None:
    names = [line.name for line in lines()]
    assert len(names) == len(set(names))
    assert {line.model for line in lines()} == {*MODELS, *WIDE}
    for model in MODELS:
        mine = [line for line in lines() if line.model == model]
        assert {line.packed for line in mine} == {line.compiled for line in mine} == {True, False}
        assert {line.micro_batches for line in mine} == {1, 4}
        assert {line.kernels for line in mine} == {"auto", "torch"}
        assert {line.recompute for line in mine} == {"none", "block"}
        assert {line.precision for line in mine} == PRECISIONS.keys() - {"fp32"}
    assert [line.model for line in predictable()] == [*MODELS, *WIDE]


def test_steps_are_measured_with_the_settings_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With others it would be another program: flash attention took twice cuDNN's time."""
    seen: dict[str, object] = {}

    def initialise(backend: str, *_: object) -> None:
        seen.update(backend=backend, allocator=os.environ.get("PYTORCH_ALLOC_CONF"))

    def build_engine(job: Job, _: object) -> None:
        seen["job"] = job

    def train(*_: object, **__: object) -> None:
        seen["attention"] = torch._C._get_sdp_priority_order()[0]
        raise StopIteration

    for variable in ALLOCATOR:
        monkeypatch.setenv(variable, "")  # restored after the test
        monkeypatch.delenv(variable)
    monkeypatch.setattr(ranks, "initialise", initialise)
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    for name, replacement in (
        ("join", _gpu_run.join.__wrapped__),
        ("create_groups", lambda *_: SimpleNamespace(device=torch.device("cuda"), world=1)),
        ("build_engine", build_engine),
        ("load_weights", lambda *_: None),
        ("weights_of", lambda *_: {}),
        ("train", train),
    ):
        monkeypatch.setattr(_gpu_run, name, replacement)
    line = replace(lines()[0], precision="fp8", recompute="block")
    with pytest.raises(StopIteration):
        _gpu_run.measure(line, Sizes(dry=False), tmp_path / "trace")
    assert seen["backend"] == "cpu:gloo,cuda:nccl"
    assert seen["allocator"] == "expandable_segments:True"
    assert seen["attention"] == SDPBackend.CUDNN_ATTENTION.value
    job = seen["job"]
    assert isinstance(job, Job) and job.precision == PRECISIONS["fp8"]
    names, usual = [field.name for field in fields(RunConfig)], RunConfig()
    assert {name for name in names if getattr(job.run, name) != getattr(usual, name)} == {
        *("precision", "fp8", "processes", "device", "micro_batch_tokens", "recompute", "engine")
    }


def test_steps_are_measured_with_the_loop_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`trainer run` and gpu_step build their loops with equal options."""
    line, sizes = replace(lines()[0], precision="fp8"), Sizes(dry=False)
    parallel: Any = SimpleNamespace(device=torch.device("cpu"), world=1)
    job, nothing = _gpu_run.make_job(line, sizes), cast("Any", None)
    loops: list[LoopOptions] = []

    def loop(*arguments: object, **_: object) -> None:
        loops.extend(options for options in arguments if isinstance(options, LoopOptions))
        raise StopIteration

    monkeypatch.setattr(worker, "Loop", loop)
    monkeypatch.setattr(worker, "training_steps", lambda *_: None)
    with pytest.raises(StopIteration):
        worker._make_loop(job, nothing, parallel, StartOptions(), Hooks(), nothing, None)
    monkeypatch.setattr(_synthetic_run, "Loop", loop)
    for name in ("build", "join"):
        monkeypatch.setattr(_gpu_run, name, lambda *_: parallel)
    with pytest.raises(StopIteration):
        _gpu_run.measure(line, sizes, tmp_path / "trace")
    assert loops[0] == loops[1] and loops[0].micro_batch_tokens == sizes.row_tokens(line)
    skipping_job = replace(
        job, run=replace(job.run, watch=WatchConfig(spike="skip"))
    )  # negative control
    assert build_loop_options(skipping_job, parallel) != loops[1]


def test_pairs_are_those_of_the_documents() -> None:
    sizes, line = Sizes(dry=False), Line(model="hybrid-1b")
    assert sizes.pairs(replace(line, packed=False)) == sizes.tokens / 2
    ends = sizes.boundaries(line, 3)
    expected = sum((b - a) ** 2 for a, b in pairwise(ends)) / 2 / sizes.tokens
    assert sizes.pairs(line, 3) == pytest.approx(expected)


def test_wide_models_are_layers_of_the_shipped_ones() -> None:
    for name, wide in WIDE.items():
        config, shipped = load_wide(name), load_model_config(wide.model)
        assert config.width == shipped.width == 4096 and set(config.layers) <= set(shipped.layers)
        assert f"{len(config.layers)} layers" in name
        assert set(load_wide(name, kinds=True).layers) == set(config.layers)


def test_one_layer_of_each_kind_stands_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"width": 32, "vocab_size": 50}

    def load(name: str, *, kinds: bool = False) -> ModelConfig:
        pattern = "[attention, se]" if kinds else "[attention, se, attention]"
        config = hybrid(pattern, 50, 32, 4, 2, 48)
        assert small == {key: getattr(config, key) for key in small}
        return config

    monkeypatch.setattr(_gpu_run, "load_wide", load)
    weights = _gpu_run.Repeated(dict(initial_weights(load("", kinds=True), 0)), "")
    every = dict(initial_weights(load(""), 0))
    assert {name: weights[name].shape for name in weights} == {
        name: weight.shape for name, weight in every.items()
    }
    assert len(weights) == len(every)
    third = [name for name in weights if name.startswith("blocks.2.")]
    assert third and all(weights[name] is weights[f"blocks.0.{name[9:]}"] for name in third)
