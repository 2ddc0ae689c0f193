"""Filling a new engine with weights."""

from __future__ import annotations

import weakref

import torch
from support.configs import CONFIGS

from headrace.models.accounting.count import build_meta
from headrace.models.config.config import load_model_config
from headrace.models.config.options.precision import PRECISIONS
from headrace.models.model.model import initial_weights
from headrace.models.weights import Weights
from headrace.trainer.checkpoints.fragments import masters
from headrace.trainer.engines.engine import load_weights
from headrace.trainer.engines.fsdp2 import Fsdp2Config
from headrace.trainer.engines.objective import Objective
from headrace.trainer.engines.optimizers.adamw import AdamWConfig
from headrace.trainer.layout.groups import Parallel


def test_whole_tensors_pass_one_at_a_time(parallel: Parallel) -> None:
    """A rank that holds shards of a model must never hold all of it."""
    model = build_meta(load_model_config(CONFIGS / "tiny.yaml"))
    engine = Fsdp2Config().build(Objective(model), AdamWConfig(), PRECISIONS["fp32"], parallel)
    drawn = initial_weights(model.config, 3)
    alive: list[weakref.ref[torch.Tensor]] = []

    def read(name: str) -> torch.Tensor:
        assert all(tensor() is None for tensor in alive), "the previous tensor is still held"
        tensor = drawn[name]
        alive.append(weakref.ref(tensor))
        return tensor

    load_weights(engine, Weights(drawn.shapes, read))
    result = {master.parameter: master.data for master in masters(engine.fragments())}
    assert result.keys() == drawn.shapes.keys() and len(alive) == len(result)
    assert all(torch.equal(data, drawn[name].float().flatten()) for name, data in result.items())
