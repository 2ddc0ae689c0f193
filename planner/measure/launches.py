"""Seconds per launched operation on a CPU, which rates of large operations do not show."""

from __future__ import annotations

import torch
from torch import Tensor

from ...models.config.config import load_model_config
from ...models.config.options.precision import PRECISIONS
from ...models.model.model import Model
from ...models.operators import BatchContext
from ..traces.trace import trace_model
from .clock import Clock

MODEL, TOKENS = "tiny-transformer", 8
"""Model with so few tokens that launches take nearly all of the time."""


def measure_launch_seconds(clock: Clock) -> float:
    """Return the mean over all operations in both passes of a model's layers."""
    config = load_model_config(MODEL)
    trace = trace_model(config, TOKENS, PRECISIONS["fp32"], "cpu")
    model = Model(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    batch = BatchContext(torch.arange(TOKENS).unsqueeze(0))

    def run_layers(x: Tensor) -> Tensor:
        for block in model.typed_blocks():
            x, *_ = block(x, batch, None, None)
        return x

    x = torch.randn(1, TOKENS, config.width, requires_grad=True)
    weights = [w for block in model.typed_blocks() for w in block.parameters()]
    times = clock.passes(run_layers, {"x": x}, weights)
    launches = sum(
        work.count
        for kind in trace.layers
        for work in (*trace.kinds[kind].forward, *trace.kinds[kind].backward)
        if work.kind == "launch"
    )
    return sum(times) / launches
