"""Output projection and loss together, one chunk of tokens at a time.

    Σ w·(log Z − logit of the target + z_loss·log²Z),   logits = hidden · weightᵀ

Logits exist for one chunk at a time: the matrix library computes a chunk of logits, a program
turns them into their gradients in place, and the library multiplies these into the gradients of
hidden and weight, all in the forward pass; the backward pass only scales. So there are three matrix
products, as in the twin, and no tensor of tokens times vocabulary. The twin is the projection
followed by `cross_entropy` in models/model/loss.py.

The chunk follows from the numbers of tokens and ids alone, not from the memory of a device: the
gradient of weight is a sum over chunks, and so has equal bits on every GPU. Rows of logits are
padded to a multiple of PADDED numbers, so that programs and matrix library read and write whole
vectors for a vocabulary of any size. (The weight needs no padding: its rows are as long as the
model is wide.)

Where the vocabulary is sharded, each rank has its rows of the weight, and three numbers of each
token cross between the two passes, a chunk at a time. The gradient of hidden is this rank's term;
the operation that gathered hidden sums the terms.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..parallel.axes import Axis
from ..parallel.groups import named
from ..parallel.tensor import gather, reduce
from .op import op

SUM_BYTES = 4
"""Bytes of a number of the sum of gradients, which is fp32."""
BLOCK = 4096
"""Logits of a token that a program ranks at a time."""
NUMBERS = 1 << 29
"""Largest chunk of logits: 1 GiB in bf16, 4,096 tokens of 128k ids."""
PARTS = 4
"""Fewest chunks of a batch, so that its logits never exist whole."""
PADDED = 64
"""Rows of logits are a multiple of this many numbers apart: 128 bytes in bf16."""


@cache
def _programs() -> Any:
    from .programs import linear_cross_entropy

    return linear_cross_entropy


def chunk_size(tokens: int, vocabulary: int) -> int:
    """Return the tokens of a chunk: if possible a multiple of 128, for the matrix units."""
    most = max(1, min(NUMBERS // vocabulary, -(-tokens // PARTS)))
    return most if most < 128 else most // 128 * 128


def row_stride(vocabulary: int) -> int:
    """Return the distance between the rows of a chunk of logits."""
    return -(-vocabulary // PADDED) * PADDED


def held_bytes(tokens: int, width: int, vocabulary: int, itemsize: int) -> int:
    """Return the bytes that a forward pass with gradients holds at most: the logits of a chunk, and
    the gradients; that of weight also in fp32. Numbers of hidden and weight have `itemsize`
    bytes."""
    logits = chunk_size(tokens, vocabulary) * row_stride(vocabulary) * itemsize
    rounded = 0 if itemsize == SUM_BYTES else vocabulary * width * itemsize
    return logits + tokens * width * itemsize + vocabulary * width * SUM_BYTES + rounded


@op("linear_cross_entropy")
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    weights: Tensor,
    z_loss: float,
    gradients: bool,
    vocab_size: int,
    axis: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return Σ w·ℓ; w·ℓ of each token without the z-loss, and that of the z-loss, [2, tokens]; and,
    if `gradients`, those of hidden and weight for Σ w·ℓ.

    hidden [tokens, width], weight [vocabulary, width], targets int64 [tokens], weights fp32. A
    target whose weight is zero is not read. All losses are fp32. `axis` names the tensor axis that
    shards the vocabulary of `vocab_size`, or is empty; all its ranks get the same losses.
    """
    ranks = named(axis)
    first = ranks.part_range(vocab_size).start
    targets, weights = targets.contiguous(), weights.contiguous()
    tokens = len(hidden)
    parts = torch.empty(2, tokens, dtype=torch.float32, device=hidden.device)
    losses = torch.empty(tokens, dtype=torch.float32, device=hidden.device)
    grad_hidden = hidden.new_empty(hidden.shape if gradients else 0)
    grad_weight = weight.new_zeros(weight.shape if gradients else 0, dtype=torch.float32)
    size = chunk_size(tokens, -(-vocab_size // ranks.size))  # the same on all ranks
    room = hidden.new_empty(size, row_stride(len(weight)))
    for start in range(0, tokens, size):
        part = slice(start, start + size)
        inputs, target, scale = hidden[part], targets[part], weights[part]
        logits = torch.mm(inputs, weight.T, out=room[: len(inputs), : len(weight)])
        log_z, chosen = _statistics(logits, target, scale, first, ranks)
        entropy, penalty = log_z - chosen, z_loss * log_z.square()
        torch.mul(scale, entropy, out=parts[0, part])
        torch.mul(scale, penalty, out=parts[1, part])
        torch.mul(scale, entropy.add_(penalty), out=losses[part])
        unread = scale == 0
        parts[:, part].masked_fill_(unread, 0)
        losses[part].masked_fill_(unread, 0)
        if not gradients:
            continue
        _programs().linear_cross_entropy_gradients[(len(inputs),)](
            logits, target, scale, log_z, len(weight), logits.stride(0), first, z_loss,
            BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        torch.mm(logits, weight, out=grad_hidden[part])
        _add_product(grad_weight, logits.T, inputs)
    return losses.sum(), parts, grad_hidden, grad_weight.to(weight.dtype)


@linear_cross_entropy.register_fake
def _(
    hidden: Tensor, weight: Tensor, targets: Tensor, weights: Tensor, z_loss: float,
    gradients: bool, *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        hidden.new_empty((), dtype=torch.float32),
        hidden.new_empty(2, len(hidden), dtype=torch.float32),
        hidden.new_empty(hidden.shape if gradients else 0),
        weight.new_empty(weight.shape if gradients else 0),
    )


def _statistics(
    logits: Tensor, targets: Tensor, weights: Tensor, first: int, ranks: Axis
) -> tuple[Tensor, Tensor]:
    """Return log Z and the target's logit of each token, over all shards of the vocabulary."""
    statistics = torch.empty(1, 3, len(logits), dtype=torch.float32, device=logits.device)
    _programs().linear_cross_entropy_statistics[(len(logits),)](
        logits, targets, weights, *statistics[0], *logits.shape[1:], logits.stride(0), first,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    top, total, chosen = gather(statistics, ranks, dim=0).unbind(1)  # [ranks, tokens] each
    highest = top.amax(0)
    total = (total * torch.exp(top - highest)).sum(0)
    return highest + total.log(), chosen.sum(0)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a·b without rounding the product to the half precision of a and b."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # Triton's interpreter
        total += a @ b


@op("linear_cross_entropy_backward")
def _backward(
    grad: Tensor, grad_hidden: Tensor, grad_weight: Tensor, axis: str
) -> tuple[Tensor, Tensor]:
    """Scale the kept gradients. Every rank has the loss, so its gradient is summed over ranks."""
    scale = reduce(grad, named(axis))

    def scaled(x: Tensor) -> Tensor:
        """Scale in fp32 and round once; torch would round the scale first."""
        out = torch.empty_like(x)
        _programs().linear_cross_entropy_scale[(-(-x.numel() // BLOCK),)](
            x, scale, out, x.numel(), BLOCK=BLOCK
        )
        return out

    return scaled(grad_hidden), scaled(grad_weight)


@_backward.register_fake
def _(grad: Tensor, grad_hidden: Tensor, grad_weight: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(grad_hidden), torch.empty_like(grad_weight)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, losses, grad_hidden, grad_weight = output
    ctx.mark_non_differentiable(losses, grad_hidden, grad_weight)
    ctx.save_for_backward(grad_hidden, grad_weight)
    ctx.axis = inputs[-1]


def _differentiate(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    return *_backward(grad, *ctx.saved_tensors, ctx.axis), *[None] * 6


linear_cross_entropy.register_autograd(_differentiate, setup_context=_keep)
