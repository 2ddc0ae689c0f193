"""The output projection and its loss together, a part of the tokens at a time.

    Σ w·(log Z − logit of the target + z_loss·log²Z),   logits = hidden · weightᵀ

Logits exist for CHUNK of them at once: the matrix library makes a chunk of logits, a program turns
them into their gradients where they lie, and the library multiplies these on into the gradients of
hidden and weight, all in the forward pass; the backward pass only scales. So there are three
matrix products, as without it, and no tensor of tokens times vocabulary. Its twin is the
projection followed by `cross_entropy` in models/loss.py.

Where processes divide the vocabulary, each has `first` and the rows of the weight that follow, and
`group` names the processes: three numbers of each token cross it, a chunk at a time, and the
gradient of hidden is each process's own part, to be summed by whoever gathered hidden.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

BLOCK = 4096
"""Logits of a token that a program takes at a time."""
NUMBERS = 1 << 27
"""Of a chunk of logits, at most: 256 MiB in bf16."""
PARTS = 8
"""Chunks into which a batch is cut at least, so that it is never kept whole."""


@cache
def _programs() -> Any:
    from .programs import linear_cross_entropy

    return linear_cross_entropy


def chunk_size(tokens: int, vocabulary: int) -> int:
    """Tokens of a chunk: a multiple of 128, which suits the matrix units, where that can be."""
    most = max(1, min(NUMBERS // vocabulary, -(-tokens // PARTS)))
    return most if most < 128 else most // 128 * 128


@torch.library.custom_op("headrace::linear_cross_entropy", mutates_args=())
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    z_loss: float,
    first: int,
    group: str,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Σ w·ℓ, w·ℓ of each token, and the `gradients` of hidden and weight for a loss of Σ w·ℓ.

    hidden [tokens, width], weight [vocabulary, width], targets int64 [tokens], weights fp32. A
    target whose weight is zero is not read. All losses are fp32.
    """
    tokens, vocabulary = len(hidden), len(weight)
    losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
    grad_hidden = hidden.new_empty(hidden.shape if gradients else 0)
    grad_weight = weight.new_zeros(weight.shape if gradients else 0, dtype=torch.float32)
    size = chunk_size(tokens, vocabulary)
    for start in range(0, tokens, size):
        part = slice(start, start + size)
        inputs, target, scale = hidden[part], targets[part], weights[part].contiguous()
        logits = inputs @ weight.T
        log_z, chosen = _reduced(logits, target, scale, first, group)
        loss = scale * (log_z - chosen + z_loss * log_z.square())
        losses[part] = torch.where(scale != 0, loss, 0)
        if not gradients:
            continue
        _programs().gradients[(len(inputs),)](
            logits, target, scale, log_z, vocabulary, first, z_loss, BLOCK=BLOCK, num_warps=8
        )
        torch.mm(logits, weight, out=grad_hidden[part])
        grad_weight += logits.T @ inputs
    return losses.sum(), losses, grad_hidden, grad_weight.to(weight.dtype)


@linear_cross_entropy.register_fake
def _(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    z_loss: float,
    first: int,
    group: str,
    gradients: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(len(hidden), dtype=torch.float32),
        hidden.new_empty(hidden.shape if gradients else 0),
        weight.new_empty(weight.shape if gradients else 0),
    )


def _reduced(
    logits: Tensor, targets: Tensor, weights: Tensor, first: int, group: str
) -> tuple[Tensor, Tensor]:
    """log Z and the target's logit of each token, over all parts of the vocabulary."""
    top, total, chosen = torch.empty(3, len(logits), dtype=torch.float32, device=logits.device)
    _programs().statistics[(len(logits),)](
        logits, targets, weights, top, total, chosen, logits.shape[1], first,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    if group:
        processes = c10d._resolve_process_group(group)  # type: ignore[attr-defined,arg-type]
        highest = top.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=processes)
        sums = torch.stack([total * torch.exp(top - highest), chosen])
        dist.all_reduce(sums, group=processes)
        top, (total, chosen) = highest, sums
    return top + total.log(), chosen


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, losses, grad_hidden, grad_weight = output
    ctx.mark_non_differentiable(losses, grad_hidden, grad_weight)
    ctx.save_for_backward(grad_hidden, grad_weight)


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grad_hidden, grad_weight = ctx.saved_tensors
    hidden, weight = (g * grad.to(g.dtype) for g in (grad_hidden, grad_weight))
    return hidden, weight, *[None] * 6


linear_cross_entropy.register_autograd(_differentiate, setup_context=_keep)
