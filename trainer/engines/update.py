"""The optimizer step, once for all engines: sums over copies, norm, clipping or refusal, step.

The device decides: the norm, the clipping factor and the refusal are tensors, so that the host
launches the whole step without waiting. It reads the norm's square once, after the launch.

Each rank holds shards of the summed gradients, as fragments. A parameter with copies has a part
of its gradient on each of them: the shards are summed over the copies, once per step. The norm
counts every element once, on the rank whose fragment `writes`.
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
from .layer_norms import CHUNK, LayerSquares, squared

SMALL = 1e-6
"""Keeps the clipping factor finite, as torch's clip_grad_norm_ does."""


@dataclass(frozen=True)
class Update:
    """Result of one optimizer step."""

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
    """Launch the step without waiting for the device. Return, as a vector of fp64 on the device,
    the square of the norm of the summed gradients: if it is not finite, the step changes nothing.
    It is NaN on all ranks if any of them asks to `discard` the gradients.
    The squares of the norms of `layers` follow it (layer_norms.py). Collective over all ranks."""
    gradients = engine.gradients()
    sum_copies(gradients)
    watched = LayerSquares(engine, layers, gradients) if layers else None
    square = squared_norm(gradients, engine.device, discard=discard)
    norm = square.sqrt()
    if engine.clip and gradients:
        limit = torch.full_like(norm, engine.clip)
        factor = torch.where(norm > limit, limit / (norm + SMALL), 1.0)
        # All gradients, also by 1: fused AdamW's grad_scale divides, which rounds some otherwise.
        for device, shards in by_device(gradients).items():
            torch._foreach_mul_(shards, factor.to(device, shards[0].dtype))
    finite = square.isfinite()  # the same on every rank
    engine.optimizer.direct(gradients, engine.fragments, finite)
    engine.step(lr, finite)
    engine.average.move(engine.fragments, finite)
    found = square.view(1)
    return found if watched is None else torch.cat([found, watched.after()])


def conclude(engine: Engine, square: float) -> Update:
    """Count the step that was launched, once the host has read the square of its norm."""
    applied = math.isfinite(square)
    engine.updates += applied
    return Update(math.sqrt(square), applied)  # exact, unlike torch's square root of fp64


def sum_copies(gradients: Sequence[Fragment]) -> None:
    """Sum in place the gradients of parameters that several ranks hold. One message per axis.

    The holders have the same parameters in the same order, cut identically.
    """
    copied: dict[Axis, list[Fragment]] = {}
    for each in gradients:
        if each.shard.copies.size > 1:
            copied.setdefault(each.shard.copies, []).append(each)
    for axis, held in copied.items():
        for shards in by_device(held).values():
            total = torch.cat(shards)
            dist.all_reduce(total, group=axis.group)
            parts = total.split([shard.numel() for shard in shards])
            torch._foreach_copy_(shards, list(parts))


def by_device(fragments: Sequence[Fragment]) -> dict[torch.device, list[Tensor]]:
    """Return the memory of fragments by device: an engine may keep some in host memory."""
    found: dict[torch.device, list[Tensor]] = {}
    for each in fragments:
        found.setdefault(each.data.device, []).append(each.data)
    return found


def squared_norm(
    gradients: Sequence[Fragment], device: torch.device, *, discard: bool = False
) -> Tensor:
    """Return the sum of squares over all parameters and ranks, fp64 on the device; NaN if any rank
    asks to `discard` the gradients."""
    square = torch.full((), math.nan if discard else 0.0, dtype=torch.float64, device=device)
    for each in gradients:
        if each.writes:
            for chunk in each.data.split(CHUNK):
                square += squared(chunk).to(device)
    dist.all_reduce(square)
    return square
