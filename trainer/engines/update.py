"""The optimizer step, once for all engines: sums over copies, norm, clipping or refusal, step.

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

SMALL = 1e-6
"""Keeps the clipping factor finite, as torch's clip_grad_norm_ does."""
CHUNK = 1 << 24
"""Elements whose squares are summed at once: fp64 makes a copy of them."""


@dataclass(frozen=True)
class Update:
    """Result of one optimizer step."""

    grad_norm: float
    """Norm of the summed gradients before clipping."""
    applied: bool
    """False if the norm was not finite: no rank changed anything."""


@torch.no_grad()
def update(engine: Engine, lr: float) -> Update:
    """Clip the gradients, apply them, and clear them. Collective over all ranks."""
    gradients = engine.gradients()
    sum_copies(gradients)
    norm = global_norm(gradients, engine.device)
    if not math.isfinite(norm):  # the same number on every rank
        engine.discard()
        return Update(norm, applied=False)
    if engine.clip and norm > engine.clip:
        torch._foreach_mul_([each.data for each in gradients], engine.clip / (norm + SMALL))
    engine.optimizer.direct(gradients, engine.fragments)
    engine.step(lr)
    return Update(norm, applied=True)


def sum_copies(gradients: Sequence[Fragment]) -> None:
    """Sum in place the gradients of parameters that several ranks hold. One message per axis.

    The holders have the same parameters in the same order, cut identically.
    """
    copied: dict[Axis, list[Tensor]] = {}
    for each in gradients:
        if each.shard.copies.size > 1:
            copied.setdefault(each.shard.copies, []).append(each.data)
    for axis, shards in copied.items():
        total = torch.cat(shards)
        dist.all_reduce(total, group=axis.group)
        parts = total.split([shard.numel() for shard in shards])
        torch._foreach_copy_(shards, list(parts))


def global_norm(gradients: Sequence[Fragment], device: torch.device) -> float:
    """Return the norm over all parameters and ranks: squares summed in fp64."""
    square = torch.zeros((), dtype=torch.float64, device=device)
    for each in gradients:
        if each.writes:
            for chunk in each.data.split(CHUNK):
                square += torch.linalg.vector_norm(chunk, dtype=torch.float64).square()
    dist.all_reduce(square)
    return math.sqrt(float(square))
