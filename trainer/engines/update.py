"""Run the optimizer step for all engines: sum over copies, norm, clipping or refusal, step.

Norm, clipping factor and refusal are tensors on the device, so that the host launches the step
without waiting. The host reads the squared norm once, after the launch.

A rank holds shards of the summed gradients, as fragments. Each copy of a copied parameter has only
a partial gradient, so the shards are summed over the copies once per step. The norm counts an
element once, on the rank whose fragment `writes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...models.parallel.axes import Axis
from ..checkpoints.fragments import Fragment
from .engine import Engine
from .layer_norms import LayerSquares, sums_of_squares

SMALL = 1e-6
"""Keeps the clipping factor finite, as torch's clip_grad_norm_ does."""


@dataclass(frozen=True)
class Update:
    """Result of an optimizer step."""

    grad_norm: float
    """Norm of the summed gradients before clipping."""
    applied: bool
    """False if the norm was not finite: no rank changed anything."""


def update(engine: Engine, lr: float) -> Update:
    """Clip the gradients, apply them, and clear them. Collective over all ranks."""
    return conclude(engine, float(launch(engine, lr)[0]))


@torch.no_grad()
def launch(
    engine: Engine, lr: float, layers: Sequence[str] = (), *, discard: bool = False
) -> Tensor:
    """Launch the step without waiting for the device. Collective over all ranks.

    Return an fp64 vector on the device: the squared norm of the summed gradients, then the squared
    norms of `layers` (layer_norms.py). If the first is not finite, the step changes nothing; it is
    NaN on all ranks if any rank asks to `discard` the gradients.
    """
    gradients = engine.gradients()
    sum_copies(gradients)
    layer_squares = LayerSquares(engine, layers, gradients) if layers else None
    square = squared_norm(gradients, engine.device, discard=discard)
    norm = square.sqrt()
    if engine.clip and gradients:
        limit = torch.full_like(norm, engine.clip)
        factor = torch.where(norm > limit, limit / (norm + SMALL), 1.0)
        # Multiply also by 1: fused AdamW's grad_scale would divide, which rounds differently.
        for device, shards in group_by_device(gradients).items():
            torch._foreach_mul_(shards, factor.to(device, shards[0].dtype))
    finite = square.isfinite()  # the same on every rank
    engine.optimizer.direct(gradients, engine.fragments, finite)
    engine.step(lr, finite)
    engine.average.move(engine.fragments, finite)
    balance_experts(engine, finite)
    squares = square.view(1)
    if layer_squares is not None:
        squares = torch.cat([squares, layer_squares.reduce_after_step()])
    return squares


def balance_experts(engine: Engine, finite: Tensor) -> None:
    """Move the biases that balance the experts, by the loads of all ranks, unless the step changes
    nothing. Collective over all ranks."""
    model = engine.objective.model
    if model.balance is not None:
        counts = model.balance.take(engine.device)
        dist.all_reduce(counts)
        model.balance.move(model.blocks, counts, finite)


def conclude(engine: Engine, square: float) -> Update:
    """Return the result of a launched step, from its squared norm, and count the update."""
    applied = math.isfinite(square)
    engine.updates += applied
    return Update(math.sqrt(square), applied)  # exact, unlike torch's square root of fp64


def sum_copies(gradients: Sequence[Fragment]) -> None:
    """Sum the gradients of copied parameters in place, with a single message per axis.

    The ranks that hold copies have the same parameters in the same order, cut identically.
    """
    copied: dict[Axis, list[Fragment]] = {}
    for gradient in gradients:
        if gradient.shard.copies.size > 1:
            copied.setdefault(gradient.shard.copies, []).append(gradient)
    for axis, copies in copied.items():
        for shards in group_by_device(copies).values():
            total = torch.cat(shards)
            dist.all_reduce(total, group=axis.group)
            sums = total.split([shard.numel() for shard in shards])
            torch._foreach_copy_(shards, list(sums))


def group_by_device(fragments: Sequence[Fragment]) -> dict[torch.device, list[Tensor]]:
    """Return the fragments' tensors by device: an engine may keep some in host memory."""
    tensors: dict[torch.device, list[Tensor]] = {}
    for fragment in fragments:
        tensors.setdefault(fragment.data.device, []).append(fragment.data)
    return tensors


def squared_norm(
    gradients: Sequence[Fragment], device: torch.device, *, discard: bool = False
) -> Tensor:
    """Return the squared norm over all parameters and ranks, a scalar in fp64 on the device; NaN
    if any rank asks to `discard` the gradients. Collective over all ranks."""
    square = torch.full((), math.nan if discard else 0.0, dtype=torch.float64, device=device)
    if written := [gradient.data for gradient in gradients if gradient.writes]:
        square += sums_of_squares(written, device).cumsum(0)[-1]  # in the order of the gradients
    dist.all_reduce(square)
    return square
