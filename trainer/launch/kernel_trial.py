"""Trial of the fused kernels before the first step, for `kernels.fallback: true`.

A model with one layer of each kind, at full width, runs one short row forward and backward. A
kernel that cannot be compiled or launched raises an error, and plain torch takes its place on all
ranks. An error that the GPU reports later, such as an illegal access, ends the process: CUDA cannot
be used after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from ...models.accounting.count import build_meta
from ...models.config.config import ModelConfig
from ...models.config.options.precision import Precision
from ...models.config.pattern import Layer
from ...models.documents import Documents
from ...models.kernels import choice
from ...models.layers.attention.order import attention_order
from ...models.transforms.fp8 import quantize
from ..engines.objective import Objective
from ..layout.groups import Parallel
from ..run.job import Job

LENGTH = 1024
"""Tokens of the row."""


def settle_kernels(job: Job, parallel: Parallel) -> dict[str, str]:
    """Replace kernels that fail on any rank. Return them with the reason. Collective."""
    run = job.run
    if not run.kernels.fallback or parallel.device.type != "cuda":
        return {}
    with attention_order(run.kernels.order(deterministic=run.deterministic)):
        own = failing(job.model, job.precision, parallel.device, run.z_loss)
    of_ranks: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(parallel.control))]
    dist.all_gather_object(of_ranks, own, parallel.control)
    for found in reversed(of_ranks):
        choice.FAILED.update(found)
    return dict(choice.FAILED)


def failing(
    config: ModelConfig,
    precision: Precision,
    device: torch.device,
    z_loss: float = 0.0,
    length: int = LENGTH,
) -> dict[str, str]:
    """Return the kernels of the model that fail on this device, and replace them. `length` is that
    of the rows."""
    found: dict[str, str] = {}
    config = replace(config, pattern=" + ".join(_kinds(config)))
    fp8 = None if precision.fp8 is None else replace(precision.fp8, ends=0)
    while True:
        try:
            _step(config, replace(precision, fp8=fp8), device, z_loss, length)
        except choice.KernelFailed as error:
            if error.kernel in found:  # its twin does not take its place: `kernel: triton`
                raise
            found[error.kernel] = choice.FAILED[error.kernel] = error.problem
        else:
            return found


def _kinds(config: ModelConfig) -> Iterator[str]:
    """Yield the pattern of each kind of layer."""
    for layer in dict.fromkeys(config.layers):
        yield f"[{_pattern(layer)}]"


def _pattern(layer: Layer) -> str:
    before = f"{layer.shared}>" if layer.shared else ""
    return f"{before}{layer.mixer}{'&' if layer.parallel else '/'}{layer.mlp or 'none'}"


def _step(
    config: ModelConfig, precision: Precision, device: torch.device, z_loss: float, length: int
) -> None:
    """Run one row of one document, and one of two, forward and backward."""
    model = quantize(build_meta(config), precision.fp8)
    model.to_empty(device=device)
    model.cast(precision)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.01)
    objective = Objective(model, z_loss)
    length = min(length, config.learned_positions or length)
    tokens = torch.zeros(1, length, dtype=torch.int64, device=device)
    weights = torch.ones(1, length, device=device)
    cuts = torch.tensor([0, length // 3, length])
    two = Documents.from_cu_seqlens(cuts, (1, length)).to(device)
    for documents in (None, two):
        objective(tokens, tokens, weights, documents).total.backward()
