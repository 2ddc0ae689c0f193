"""Output projection and loss together, one token chunk at a time.

    Σ w·(log Z − logit_target + z_loss·log²Z),   logits = hidden · weightᵀ

Logits exist for one chunk at a time: the matrix library computes the chunk's logits, a program
turns them into their gradients in place, and the library multiplies these into grad_hidden and
grad_weight, all in the forward pass; the backward pass only scales them, in place. So there are
three matrix products, as in the twin, and no tensor [tokens, vocabulary]. The twin is the
projection followed by `cross_entropy` in models/model/loss.py.

Memory is Liger's or less, unless its chunks have fewer than MIN_TOKENS: both gradients, and a chunk
of logits. With T tokens, V ids and width H, Liger's chunk has T·H/V tokens, rounded up to a power
of two. grad_weight, a sum over chunks, is summed in fp32 if there is room, which takes a vocabulary
smaller than about half the tokens; else each chunk's product, summed in fp32 inside, adds to
numbers in the weight's dtype, as in Liger: an fp32 sum would take half as much memory again, and
without it the gradient of 16 chunks has an error of 5e-3 beside 2e-3. All of this follows from
sizes, not from a device's memory, so the sum has equal bits on every GPU.

Logit rows are padded to a multiple of ROW_MULTIPLE numbers, so that programs and matrix library
read and write whole vectors for any vocabulary size. (The weight needs no padding: its rows are as
long as the model is wide.)

Where the vocabulary is sharded, each rank has its weight rows, and three numbers per token cross
between the two passes, a chunk at a time. grad_hidden is this rank's term; the operation that
gathered hidden sums the terms.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..parallel.axes import Axis
from ..parallel.groups import find_axis
from ..parallel.tensor import gather, reduce
from .launch import Programs
from .op import op

BLOCK = 4096
"""Logits that a program processes at a time, for one token."""
TOKEN_MULTIPLE = 128
"""A chunk has a multiple of so many tokens, for the matrix units."""
MIN_TOKENS = 512
"""Lower bound on a chunk's tokens: with fewer, products take as long as reading the weight."""
ROW_MULTIPLE = 64
"""The distance between logit rows is a multiple of this: 128 bytes in bf16."""


@cache
def _programs() -> Any:
    from .programs import linear_cross_entropy

    return Programs(linear_cross_entropy)


def liger_chunk_logits(num_tokens: int, width: int, vocabulary: int) -> int:
    """Return the logits in a chunk of Liger's (of Liger 0.8.5)."""
    num_chunks = -(-vocabulary // width)
    tokens: int = 1 << (-(-num_tokens // num_chunks) - 1).bit_length()
    return min(tokens, num_tokens) * vocabulary


def chunk_layout(
    num_tokens: int, width: int, vocabulary: int, dtype: torch.dtype
) -> tuple[int, torch.dtype]:
    """Return the tokens per chunk, and the dtype in which grad_weight is summed."""
    num_logits, stride = liger_chunk_logits(num_tokens, width, vocabulary), row_stride(vocabulary)
    min_tokens, weight_numbers = min(MIN_TOKENS, num_tokens), vocabulary * width
    # Sums twice as wide take a part of the logits' room; at the end, beside the rounded ones, all.
    beside_sums = (num_logits - weight_numbers) // stride
    sums_fit = num_logits >= 2 * weight_numbers and beside_sums >= min_tokens
    if dtype.itemsize < torch.float32.itemsize and sums_fit:
        max_tokens, sum_dtype = beside_sums, torch.float32
    else:
        max_tokens, sum_dtype = num_logits // stride, dtype
    max_tokens = max(max_tokens, MIN_TOKENS) // TOKEN_MULTIPLE * TOKEN_MULTIPLE
    return max(1, min(num_tokens, max_tokens)), sum_dtype


def row_stride(vocabulary: int) -> int:
    """Return the distance between logit rows, in numbers."""
    return -(-vocabulary // ROW_MULTIPLE) * ROW_MULTIPLE


def workspace_bytes(num_tokens: int, width: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Return a forward pass's peak bytes, with gradients: grad_hidden, the sum of grad_weight, and
    first one chunk's logits, then the rounded grad_weight if its sum is wider. The backward pass
    allocates nothing."""
    tokens, sum_dtype = chunk_layout(num_tokens, width, vocabulary, dtype)
    logits = tokens * row_stride(vocabulary) * dtype.itemsize
    weight_numbers = vocabulary * width
    rounded = 0 if sum_dtype == dtype else weight_numbers * dtype.itemsize
    sums = num_tokens * width * dtype.itemsize + weight_numbers * sum_dtype.itemsize
    return sums + max(logits, rounded)


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
    """Return Σ w·ℓ; per-token terms [2, tokens], without the z-loss and the z-loss alone; and, if
    `gradients`, the gradients of Σ w·ℓ for hidden [tokens, width] and weight [vocabulary, width].

    hidden [tokens, width], weight [vocabulary, width], targets int64 [tokens], weights fp32. A
    target whose weight is zero is not read. All losses are fp32. `axis` names the tensor axis that
    shards the vocabulary of `vocab_size`, or is empty; all its ranks get the same losses.
    """
    ranks = find_axis(axis)
    first_id = ranks.part_range(vocab_size).start
    targets, weights = targets.contiguous(), weights.contiguous()
    num_tokens = len(hidden)
    token_losses = torch.empty(2, num_tokens, dtype=torch.float32, device=hidden.device)
    losses = torch.empty(num_tokens, dtype=torch.float32, device=hidden.device)
    grad_hidden = hidden.new_empty(hidden.shape if gradients else 0)
    tokens_per_chunk, sum_dtype = chunk_layout(
        num_tokens, hidden.shape[1], -(-vocab_size // ranks.size), hidden.dtype
    )  # the same on all ranks
    grad_weight = weight.new_zeros(weight.shape if gradients else 0, dtype=sum_dtype)
    logits = logits_buffer = hidden.new_empty(tokens_per_chunk, row_stride(len(weight)))
    for start in range(0, num_tokens, tokens_per_chunk):
        chunk = slice(start, start + tokens_per_chunk)
        chunk_hidden, chunk_targets, chunk_weights = hidden[chunk], targets[chunk], weights[chunk]
        logits = torch.mm(
            chunk_hidden, weight.T, out=logits_buffer[: len(chunk_hidden), : len(weight)]
        )
        log_z, target_logit = _softmax_statistics(
            logits, chunk_targets, chunk_weights, first_id, ranks
        )
        entropy, penalty = log_z - target_logit, z_loss * log_z.square()
        torch.mul(chunk_weights, entropy, out=token_losses[0, chunk])
        torch.mul(chunk_weights, penalty, out=token_losses[1, chunk])
        torch.mul(chunk_weights, entropy.add_(penalty), out=losses[chunk])
        ignored = chunk_weights == 0
        token_losses[:, chunk].masked_fill_(ignored, 0)
        losses[chunk].masked_fill_(ignored, 0)
        if not gradients:
            continue
        _programs().linear_cross_entropy_gradients[(len(chunk_hidden),)](
            logits, chunk_targets, chunk_weights, log_z, len(weight), logits.stride(0), first_id,
            z_loss, BLOCK=BLOCK, num_warps=8,
        )  # fmt: skip
        torch.mm(logits, weight, out=grad_hidden[chunk])
        _add_product(grad_weight, logits.T, chunk_hidden)
    del logits, logits_buffer  # their memory is free for the rounded gradient
    return losses.sum(), token_losses, grad_hidden, grad_weight.to(weight.dtype)


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


def _softmax_statistics(
    logits: Tensor, targets: Tensor, weights: Tensor, first_id: int, ranks: Axis
) -> tuple[Tensor, Tensor]:
    """Return log Z and the target's logit [tokens], over all vocabulary shards, for logits [tokens,
    vocabulary shard]."""
    statistics = torch.empty(1, 3, len(logits), dtype=torch.float32, device=logits.device)
    _programs().linear_cross_entropy_statistics[(len(logits),)](
        logits, targets, weights, *statistics[0], *logits.shape[1:], logits.stride(0), first_id,
        BLOCK=BLOCK, num_warps=8,
    )  # fmt: skip
    max_logits, exp_sums, target_logits = gather(statistics, ranks, dim=0).unbind(
        1
    )  # [ranks, tokens] each
    global_max = max_logits.amax(0)
    exp_sums = (exp_sums * torch.exp(max_logits - global_max)).sum(0)
    return global_max + exp_sums.log(), target_logits.sum(0)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a·b without rounding the product to the half precision of a and b."""
    if a.dtype == total.dtype and (a.is_cuda or a.dtype == torch.float32):
        torch.addmm(total, a, b, out=total)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:  # Triton's interpreter: a CPU's product rounds before it adds
        total.copy_(total.float() + a.float() @ b.float())


@op("linear_cross_entropy_backward", mutates=("grad_hidden", "grad_weight"))
def _backward(grad: Tensor, grad_hidden: Tensor, grad_weight: Tensor, axis: str) -> None:
    """Scale the stored gradients, in place. Every rank has the loss, so its gradient is summed over
    ranks. The product is fp32 and rounded once; torch would round the scale first."""
    scale = reduce(grad, find_axis(axis))
    for x in (grad_hidden, grad_weight):
        _programs().linear_cross_entropy_scale[(-(-x.numel() // BLOCK),)](
            x, scale, x, x.numel(), BLOCK=BLOCK
        )


@_backward.register_fake
def _(grad: Tensor, grad_hidden: Tensor, grad_weight: Tensor, *_: Any) -> None: ...


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, losses, grad_hidden, grad_weight = output
    ctx.mark_non_differentiable(losses, grad_hidden, grad_weight)
    ctx.save_for_backward(grad_hidden, grad_weight)
    ctx.axis = inputs[-1]


def _autograd_backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    grads = ctx.saved_tensors
    if torch._C._autograd._get_current_graph_task_keep_graph():  # a later pass needs them unscaled
        grads = tuple(saved.clone() for saved in grads)
    _backward(grad, *grads, ctx.axis)
    return *grads, *[None] * 6


linear_cross_entropy.register_autograd(_autograd_backward, setup_context=_setup_context)
